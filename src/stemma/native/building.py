"""Finds the shared library of an instruction-set level, or has it compiled.

A library is looked for beside the package (a wheel brings them prebuilt), then in the user's cache
(`$XDG_CACHE_HOME/stemma`, default `~/.cache/stemma`), and is compiled into the cache if neither has it. Its
name holds a hash of sources and flags; in the cache also one of the compiler. Nothing depends on the machine
that compiles: a library runs wherever the processor has its level.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from stemma.config.folders import cache_folder
from stemma.native.announcing import announced, say
from stemma.native.compiling import (
    BUILD_KEY,
    SCRATCH_PREFIX,
    SOURCES,
    BuildFailed,
    Compiler,
    compile_library,
)
from stemma.native.levels import LEVELS, Level

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel puts its libraries."""
Origin = Literal["prebuilt", "cached", "compiled"]


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library and where it came from."""

    path: Path
    origin: Origin


def find_compiler() -> Compiler | None:
    """Return the compiler: `$CXX`, else g++ or c++ on the path; None if there is none that runs."""
    path = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    return None if path is None else _examine(path)


@cache
def _examine(path: str) -> Compiler | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return Compiler(path, (done.stdout.splitlines() or [""])[0])


def find_or_build(level: Level) -> Library:
    """Return the library of `level`; compile it if there is none. Raises BuildFailed."""
    prebuilt = PREBUILT / library_name(level)
    if prebuilt.exists():
        return Library(prebuilt, "prebuilt")
    folder = _cache_folder()
    compiler = find_compiler()
    if compiler is None:
        for path in sorted(folder.glob(f"{_stem(level)}-*.so")):
            return Library(path, "cached")
        raise BuildFailed("no C++ compiler found (g++, c++ or $CXX)")
    key = hashlib.sha256(compiler.version.encode()).hexdigest()[:8]
    target = folder / f"{_stem(level)}-{key}.so"
    if target.exists():
        return Library(target, "cached")
    with _only_builder(folder):
        if target.exists():  # another process compiled it meanwhile
            return Library(target, "cached")
        with announced(level) as on_unit:
            compile_library(level, compiler, target, on_unit)
    return Library(target, "compiled")


def build(level: Level, folder: Path) -> Path:
    """Compile the library of `level` into `folder` under the name that `find_or_build` looks for in a wheel.

    Raises BuildFailed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler found (g++, c++ or $CXX)")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(level)
    compile_library(level, compiler, target)
    return target


def prebuilt_levels() -> tuple[Level, ...]:
    """Return the levels whose libraries the installed wheel brings, lowest first; none from sources."""
    return tuple(level for level in LEVELS if (PREBUILT / library_name(level)).exists())


def library_name(level: Level) -> str:
    """Return the file name of a level's prebuilt library."""
    return f"{_stem(level)}.so"


def _stem(level: Level) -> str:
    return f"kernels-{level.name}-{_source_hash(level)}"


@cache
def _source_hash(level: Level) -> str:
    key = hashlib.sha256(repr((BUILD_KEY, level.flags)).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        key.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return key.hexdigest()[:16]


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: processes that start at once compile once. It ends with its process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process compiles the CPU kernels: waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except (
            OSError
        ):  # a file system without locks: each compiles for itself, and the last one's library stays
            yield
            return
        for left in folder.glob(f"{SCRATCH_PREFIX}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def _cache_folder() -> Path:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _private_folder()


@cache
def _private_folder() -> Path:
    """Return a folder of this process: libraries in it are built anew by the next one."""
    return Path(tempfile.mkdtemp(prefix="stemma-"))
