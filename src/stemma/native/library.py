"""Builds and loads the C++ kernels; without a compiler, or with ``STEMMA_NATIVE=0``, there are none.

The library is compiled once per machine kind into ``$XDG_CACHE_HOME/stemma`` (default ``~/.cache/stemma``),
under a name made of the hash of sources, flags and the processor's features. It links against the OpenMP
runtime that torch brings: two runtimes in one process would have their threads wait for each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

ABI = 2
_SOURCES = (
    *("vec.h", "amx.h", "plan.h", "attention.h", "copy.h"),
    *("layers.h", "strips.h", "team.h", "decoder_step.h", "kernels.cpp"),
)
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno"),
    *("-Wno-psabi", "-w"),
)
_COMPILE_TIMEOUT_S = 120.0


class BatchArgs(ctypes.Structure):
    """`Batch` of plan.h: a step's sequences."""

    _fields_ = (
        ("num_seqs", ctypes.c_int32),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int32),
    )


class AttendArgs(ctypes.Structure):
    """`AttendArgs` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "output")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("block_stride", "token_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("key_dim", "value_dim", "window", "is_bf16")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class NormArgs(ctypes.Structure):
    """`NormArgs` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("delta", "residual", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
        ("eps", ctypes.c_float),
    )


class RotateArgs(ctypes.Structure):
    """`RotateArgs` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "query")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "slots")),
        *((name, ctypes.c_int64) for name in ("tokens", "block_stride", "token_stride", "head_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("heads", "kv_heads", "dim", "block_size", "is_bf16", "threads")
        ),
        ("eps", ctypes.c_float),
    )


class GateArgs(ctypes.Structure):
    """`GateArgs` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
    )


class Strips(ctypes.Structure):
    """`Strips` of strips.h: a packed weight [n, k] and its bias."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "bias")),
        *((name, ctypes.c_int64) for name in ("n", "k")),
    )


class LayerWeights(ctypes.Structure):
    """`LayerWeights` of decoder_step.h."""

    _fields_ = (
        *((name, Strips) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class StepArgs(ctypes.Structure):
    """`StepArgs` of decoder_step.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_layers", "threads")),
        ("final_norm", ctypes.c_void_p),
        ("head", Strips),
        *((name, ctypes.c_int64) for name in ("rows", "num_logits")),
        ("logits_rows", ctypes.c_void_p),
        ("hidden_dim", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "logits", "room")),
        ("layer_bytes", ctypes.c_int64),
        ("rotate", RotateArgs),
        ("attend", AttendArgs),
        ("eps", ctypes.c_float),
    )


class Kernels:
    """The loaded library; each function takes a pointer to its argument structure."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.plan_new = library.stemma_plan_new
        self.plan_new.restype = ctypes.c_void_p
        self.plan_new.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
        self.plan_free = library.stemma_plan_free
        self.plan_free.argtypes = [ctypes.c_void_p]
        self.plan_free.restype = None
        self.plan_cost = library.stemma_plan_cost
        self.plan_cost.argtypes = [ctypes.c_void_p]
        self.plan_cost.restype = ctypes.c_int64
        self.attend = library.stemma_attend
        self.attend.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.attend.restype = None
        self.copy = library.stemma_copy
        self.copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self.copy.restype = None
        self.has_bf16_dot = bool(library.stemma_has_bf16_dot())
        """Whether whole steps in one call are there: they need AVX512_BF16."""
        self.has_amx = bool(library.stemma_has_amx())
        if self.has_bf16_dot:
            self.decoder_step = library.stemma_decoder_step
            self.decoder_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            self.decoder_step.restype = None
            self.decoder_step_room = library.stemma_decoder_step_room
            self.decoder_step_room.argtypes = [ctypes.c_void_p]
            self.decoder_step_room.restype = ctypes.c_int64
            self.take_rows = library.stemma_take_rows
            self.take_rows.argtypes = [
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)
            ]
            self.take_rows.restype = None
        self.add_rms_norm = library.stemma_add_rms_norm
        self.rotate_and_write = library.stemma_rotate_and_write
        self.silu_and_multiply = library.stemma_silu_and_multiply
        for function in (self.add_rms_norm, self.rotate_and_write, self.silu_and_multiply):
            function.argtypes = [ctypes.c_void_p]
            function.restype = None


@cache
def load_kernels() -> Kernels | None:
    """Return the kernels, building them if need be; None where they are switched off or can't be built."""
    if os.environ.get("STEMMA_NATIVE") == "0" or not _processor_fits():
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        _log.info("no g++ found: attention runs on torch alone")
        return None
    try:
        library = ctypes.CDLL(str(_build(compiler)))
        if library.stemma_abi() != ABI:
            raise OSError("the cached library is of another version")
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("native kernels can't be built, attention runs on torch alone: %s", error)
        return None
    return Kernels(library)


def _build(compiler: str) -> Path:
    """Return the compiled library, from the cache if it is there. Raises OSError or SubprocessError."""
    folder = Path(__file__).parent
    sources = [(folder / name).read_bytes() for name in _SOURCES]
    key = hashlib.sha256(b"\0".join([*sources, repr(_FLAGS).encode(), compiler.encode(), _cpu_features()]))
    name = f"kernels-{key.hexdigest()[:24]}.so"
    cache_folder = _cache_folder()
    target = cache_folder / name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=cache_folder) as scratch:
        output = Path(scratch) / name
        runtime = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
        extra = [str(runtime)] if runtime.exists() else []
        subprocess.run(
            [compiler, *_FLAGS, str(folder / "kernels.cpp"), *extra, "-o", str(output)],
            check=True,
            capture_output=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        output.replace(target)  # atomic: several processes may build at once
    return target


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stemma"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="stemma-"))  # private to this process; built anew each time


def _processor_fits() -> bool:
    """Whether this is Linux on x86 with AVX-512: with less, torch is faster than these kernels."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return {b"avx512f", b"avx512bw", b"avx512vl"} <= set(_cpu_features().split())


def _cpu_features() -> bytes:
    """Return what ``-march=native`` depends on: a home directory may be shared by unlike machines."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return line.encode()
    return platform.machine().encode()
