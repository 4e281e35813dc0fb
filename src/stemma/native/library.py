"""Loads the C++ kernels at the processor's instruction-set level; without them everything runs on torch.

`load_kernels` picks the level (levels.py) and finds or compiles its library (building.py).
``STEMMA_NATIVE=0`` switches the kernels off.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from stemma.native.building import Library, Origin, find_compiler, find_or_build, prebuilt_levels
from stemma.native.compiling import BuildFailed, Compiler
from stemma.native.levels import (
    LEVELS,
    Level,
    LevelChoice,
    available_levels,
    choose_level,
    processor_features,
)

_log = logging.getLogger(__name__)


_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def _function(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = None) -> Any:
    """Return a function of the library; no `arguments`: it takes a pointer; None: nothing."""
    found = getattr(library, f"stemma_{name}")
    found.argtypes = [] if arguments == (None,) else list(arguments or (_POINTER,))
    found.restype = result
    return found


class Kernels:
    """The loaded library; each function takes a pointer to its argument structure."""

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        """Name of the instruction-set level they are compiled for."""
        of = partial(_function, library)
        self.plan_new = of("plan_new", _POINTER, _INT32, _INT32, _INT32, result=_POINTER)
        self.plan_free = of("plan_free")
        self.attend = of("attend", _POINTER, _POINTER)
        self.write_rows = of("write_rows")
        self.merge_parts = of("merge_parts")
        self.copy = of("copy", _POINTER, _POINTER, _INT64)
        self.copy_runs = of("copy_runs", _POINTER, _POINTER, _POINTER, _INT64)
        self.kv_room = of("kv_room", _INT64, _INT64, _INT64, result=_INT64)
        self.pack_kv = of("pack_kv", _POINTER, _INT64, _INT64, _INT64, _POINTER, result=_INT64)
        self.unpack_kv = of("unpack_kv", *(_POINTER, _INT64, _INT64, _INT64, _POINTER, _INT64), result=_INT32)
        self.decoder_step = of("decoder_step", _POINTER, _POINTER)
        self.decoder_step_room = of("decoder_step_room", result=_INT64)
        self.pack = of("pack")
        self.pack_codes = of("pack_codes")
        self.packed_bytes = of("packed_bytes", _POINTER, _INT32, result=_INT64)
        self.spread = of("spread")
        self.compress = of("compress")
        self.compressed_bytes = of("compressed_bytes", result=_INT64)
        self.reads_compressed = of("reads_compressed", None, result=_INT32)
        self._byte_dots = of("byte_dots", _INT32, result=_INT32)
        self.multiply = of("multiply")
        self.multiply_registers = of("multiply_registers", _INT64, _INT32, _INT32, result=_INT64)
        self.mixture = of("mixture")
        self.mixture_room = of("mixture_room", result=_INT64)
        self.read_memory = of("read_memory", _POINTER, _INT64, _INT32, result=ctypes.c_float)
        self.masked_argmax = of("masked_argmax", _POINTER, _POINTER, _INT64, result=_INT64)
        self.take_rows = of("take_rows", _POINTER, _POINTER, _INT64, _POINTER, _INT32, _INT32)
        self.add_rms_norm = of("add_rms_norm")
        self.silu_and_multiply = of("silu_and_multiply")
        self.scan = of("scan")
        self.select = of("select")
        self.convolve = of("convolve")
        self.select_tokens = of("select_tokens")

    def byte_dots(self, *, allowed: bool = True) -> bool:
        """Whether bytes are multiplied by an instruction of their own; for tests it can be forbidden."""
        return bool(self._byte_dots(allowed))


@dataclass(frozen=True, slots=True)
class KernelReport:
    """How this process computes, for bug reports."""

    features: tuple[str, ...]
    """Those features of the processor that some level needs."""
    levels: tuple[str, ...]
    """Levels that the processor has, lowest first."""
    wheel_levels: tuple[str, ...]
    """Levels that the installed wheel brings, lowest first; none from sources."""
    level: str | None
    """The level that runs; None: no kernels, torch computes everything."""
    reason: str
    """Why this level, or why none."""
    int8_products: str
    """The instructions that multiply int8 with int8 or int4, for people."""
    origin: Origin | None
    path: Path | None
    """The loaded library."""
    compiler: Compiler | None


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernels: Kernels | None
    library: Library | None
    problem: str | None


_last_loaded: list[Kernels] = []


def load_kernels(isa: str = "auto") -> Kernels | None:
    """Return the kernels of a level (`auto`: ``STEMMA_ISA``, else the highest one), compiled if need be.

    None where they are switched off or can't be built; one line in the log says so. Raises ConfigError if the
    level is unknown, or higher than the processor's.
    """
    return _load(choose_level(isa)).kernels


def loaded_kernels() -> Kernels | None:
    """Return the kernels that were loaded last, of whatever level; None: none are, and none are made."""
    return _last_loaded[-1] if _last_loaded else None


def prepare_kernels(isa: str = "auto") -> None:
    """Find or compile the library that `load_kernels` loads; torch isn't imported. Raises ConfigError.

    For commands: what is compiled is said before they show a display of their own.
    """
    choice = choose_level(isa)
    if os.environ.get("STEMMA_NATIVE") != "0":
        _find(choice.level)


def report_kernels(isa: str = "auto") -> KernelReport:
    """Load the kernels and say what they are and why. Raises ConfigError as `load_kernels` does."""
    choice = choose_level(isa)
    loaded = _load(choice)
    kernels, library = loaded.kernels, loaded.library
    needed = {feature for level in LEVELS for feature in level.features}
    return KernelReport(
        features=tuple(sorted(needed & processor_features())),
        levels=tuple(level.name for level in available_levels()),
        wheel_levels=tuple(level.name for level in prebuilt_levels()),
        level=None if kernels is None else kernels.level,
        reason=_reason(choice, loaded),
        int8_products="none" if kernels is None else _int8_products(kernels),
        origin=None if library is None else library.origin,
        path=None if library is None else library.path,
        compiler=find_compiler(),
    )


def missed_level(isa: str = "auto") -> str | None:
    """Return the level that should run here where a lower one runs, or none; else None."""
    choice = choose_level(isa)
    kernels = _load(choice).kernels
    is_wanted = os.environ.get("STEMMA_NATIVE") != "0"
    return (
        choice.level.name if is_wanted and (kernels is None or kernels.level != choice.level.name) else None
    )


def _reason(choice: LevelChoice, loaded: _Loaded) -> str:
    if loaded.problem is None:
        return choice.reason
    if loaded.kernels is None:
        return f"{choice.reason}; {loaded.problem}"
    of = "this wheel has" if prebuilt_levels() else "could be compiled"
    return f"the highest level that {of}; this processor has {choice.level.name}, but {loaded.problem}"


def _int8_products(kernels: Kernels) -> str:
    vnni = kernels.byte_dots()
    if kernels.level == LEVELS[-1].name:
        return "AMX-INT8, VNNI for a few rows" if vnni else "AMX-INT8"
    name = {"neon": "SDOT", "neon_bf16": "USDOT"}.get(kernels.level, "VNNI")
    return name if vnni else f"16-bit multiply-add (no {name})"


def drop_kernels() -> None:
    """Drop what is known of libraries: the next `load_kernels` looks anew. Loaded kernels stay usable."""
    _load_level.cache_clear()
    _last_loaded.clear()
    _find.cache_clear()
    _log_once.cache_clear()


def _load(choice: LevelChoice) -> _Loaded:
    if os.environ.get("STEMMA_NATIVE") == "0":
        return _Loaded(None, None, "STEMMA_NATIVE=0 switches the kernels off")
    loaded = _load_level(choice.level)
    if loaded.kernels is None and not choice.forced:
        # An old compiler doesn't know the newest instructions, and a system may refuse tiles.
        for level in reversed(available_levels()[:-1]):
            lower = _load_level(level)
            if lower.kernels is not None:
                _log_once(f"kernels run at level {level.name}, not {choice.level.name}: {loaded.problem}")
                return _Loaded(lower.kernels, lower.library, loaded.problem)
    if loaded.kernels is None:
        _log_once(
            f"no native kernels ({loaded.problem}): everything runs on torch, at about half the speed, "
            "and answers may depend on the batch in their last bits"
        )
    return loaded


@cache
def _log_once(message: str) -> None:
    _log.warning(message)


@cache
def _find(level: Level) -> Library | BuildFailed:
    try:
        return find_or_build(level)
    except BuildFailed as error:
        return error


@cache
def _load_level(level: Level) -> _Loaded:
    library = _find(level)
    if isinstance(library, BuildFailed):
        return _Loaded(None, None, str(library))
    try:
        import torch  # noqa: F401 (its OpenMP runtime has to be loaded first: the library shares it)

        loaded = ctypes.CDLL(str(library.path))
    except OSError as error:
        return _Loaded(None, None, str(error))
    if level == LEVELS[-1] and not loaded.stemma_tiles_ready():
        return _Loaded(None, None, "the system doesn't let this process use AMX tiles")
    kernels = Kernels(loaded, level.name)
    _last_loaded[:] = [kernels]
    return _Loaded(kernels, library, None)
