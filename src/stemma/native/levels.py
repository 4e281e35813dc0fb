"""Instruction-set levels: the same C++ sources compiled for several sets of processor features.

Each level includes those below it of the same architecture. A level fixes how sums are rounded, so answers
are the same on all machines that run it, but may differ between levels. `amx_emulated` runs the
code for AMX with its tiles computed by other instructions: it is slow and serves tests.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stemma.errors import ConfigError

ISA_VARIABLE = "STEMMA_ISA"


@dataclass(frozen=True, slots=True)
class Level:
    """One set of processor features and the compiler's flags for it."""

    name: str
    features: tuple[str, ...]
    """Features that the processor must have, as /proc/cpuinfo names them."""
    flags: tuple[str, ...]
    """Flags of the compiler; they name instructions, never the machine that compiles."""
    architecture: str = "x86_64"
    """The one that has these features."""


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_BF16 = (*_AVX512, "-mavx512bf16")
_AVX2_FEATURES = ("avx2", "fma", "f16c")
_AVX512_FEATURES = (*_AVX2_FEATURES, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_BF16_FEATURES = (*_AVX512_FEATURES, "avx512_bf16")
_NEON = ("-DSTEMMA_NEON=1",)
_NEON_BF16 = (*_NEON, "-march=armv8.2-a+dotprod+bf16+i8mm")
_TILE_FEATURES = ("amx_tile", "amx_bf16", "amx_int8")

NUMERIC_VERSION = 7
"""Part of the name under which KV is stored; raised when a kernel changes an order of sums or a rounding."""

LEVELS = (
    Level("portable", (), ()),
    Level("neon", ("asimd",), _NEON, "arm64"),
    Level("neon_bf16", ("asimd", "asimddp", "bf16", "i8mm"), _NEON_BF16, "arm64"),
    Level("avx2", _AVX2_FEATURES, _AVX2),
    Level("avx512", _AVX512_FEATURES, _AVX512),
    Level("avx512_bf16", _BF16_FEATURES, _BF16),
    Level("amx", (*_BF16_FEATURES, *_TILE_FEATURES), (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
)
"""From the lowest to the highest of each architecture."""
EMULATED = Level("amx_emulated", _BF16_FEATURES, (*_BF16, "-DSTEMMA_EMULATE_TILES"))
_BY_NAME = {level.name: level for level in (*LEVELS, EMULATED)}


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The level that the kernels of this process are compiled for."""

    level: Level
    reason: str
    """For people, e.g. "the highest of this processor"."""
    forced: bool
    """By a setting or the environment: then no other level takes its place."""


_ARCHITECTURES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP_BITS = {
    "asimd": (_AT_HWCAP, 1),
    "asimddp": (_AT_HWCAP, 20),
    "i8mm": (_AT_HWCAP2, 13),
    "bf16": (_AT_HWCAP2, 14),
}
"""Where Linux tells features of arm64 in a process's auxiliary vector: the word, and the bit in it."""


def architecture() -> str:
    """Return this machine's: x86_64, arm64, or what else the system calls it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


@cache
def processor_features() -> frozenset[str]:
    """Return what this machine's processor has, named as in /proc/cpuinfo; empty where nothing tells."""
    return _arm64_features() if architecture() == "arm64" else _listed_features()


def _arm64_features() -> frozenset[str]:
    """Ask the C library, not /proc/cpuinfo, which tells of another processor where arm64 is emulated."""
    getauxval = getattr(ctypes.CDLL(None), "getauxval", None)
    if getauxval is None:  # not Linux; all processors of arm64 have these
        return frozenset({"asimd"})
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return frozenset(name for name, (word, bit) in _HWCAP_BITS.items() if getauxval(word) >> bit & 1)


def _listed_features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def missing_features(level: Level) -> tuple[str, ...]:
    """Return what the processor lacks for `level`; empty if it runs here."""
    features = processor_features() if architecture() == level.architecture else frozenset()
    return tuple(name for name in level.features if name not in features)


def available_levels() -> tuple[Level, ...]:
    """Return the levels that this processor has, lowest first; the emulated one isn't among them."""
    return tuple(level for level in LEVELS if not missing_features(level))


def level_named(name: str) -> Level:
    """Return the level of that name. Raises ConfigError."""
    level = _BY_NAME.get(name)
    if level is None:
        known = ", ".join(level.name for level in LEVELS)
        raise ConfigError(f"unknown instruction-set level {name!r}; use auto or one of {known}")
    return level


def choose_level(isa: str = "auto") -> LevelChoice:
    """Return the level to run: the one named, by the environment if `isa` is `auto`, else the highest.

    Raises ConfigError if the name is unknown or the processor lacks a feature of that level.
    """
    asked, origin = isa, "the setting isa"
    if asked == "auto":
        asked, origin = os.environ.get(ISA_VARIABLE) or "auto", ISA_VARIABLE
    if asked == "auto":
        return LevelChoice(available_levels()[-1], "the highest level of this processor", forced=False)
    level = level_named(asked)
    missing = missing_features(level)
    if missing:
        raise ConfigError(
            f"{origin} asks for {level.name}, but this processor lacks {', '.join(missing)}; "
            f"the highest level here is {available_levels()[-1].name}"
        )
    return LevelChoice(level, f"{origin} asks for it", forced=True)
