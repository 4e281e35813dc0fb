"""Finds the shared library of an instruction-set level, or has it compiled.

A library is looked for beside the package (a wheel brings them prebuilt), then in the user's cache
(`$XDG_CACHE_HOME/stemma`, default `~/.cache/stemma`), and is compiled into the cache if neither has it. Its
name holds a hash of sources and flags; in the cache also one of the compiler. Nothing depends on the machine
that compiles: a library runs wherever the processor has its level. What a build has compiled stays in the
cache until its library is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from stemma.native.levels import EMULATED, LEVELS, Level

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel puts its libraries."""
_KEPT_PREFIX = "parts-"
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
    found = _find(level)
    if found is not None:
        return found
    compiler, folder = _compiler(), _cache_folder()
    target, kept = folder / _cached_name(level, compiler), _kept(folder, level, compiler)
    with _only_builder(folder) as is_alone:
        found = _find(level)
        if found is not None:  # another process compiled it meanwhile
            return found
        with announced(level) as on_unit:
            compile_library(level, compiler, target, kept, on_unit)
        if is_alone:
            shutil.rmtree(kept, ignore_errors=True)
    return Library(target, "compiled")


def build_ahead(level: Level) -> None:
    """Compile what `find_or_build` then only links (that takes torch). Raises BuildFailed."""
    compiler, folder = _compiler(), _cache_folder()
    with _only_builder(folder):
        if _find(level) is None:
            compile_library(level, compiler, None, _kept(folder, level, compiler))


def build(levels: Sequence[Level], target: Path) -> list[Path]:
    """Compile the libraries of `levels` into the folder `target`, named as in a wheel.

    Raises BuildFailed, which names the level; what was compiled of any is kept then.
    """
    compiler, folder = _compiler(), _cache_folder()
    target.mkdir(parents=True, exist_ok=True)

    def compile_level(level: Level) -> Path:
        library = target / library_name(level)
        try:
            compile_library(level, compiler, library, _kept(folder, level, compiler))
        except BuildFailed as error:
            raise BuildFailed(f"the kernels of level {level.name} don't compile: {error}") from error
        return library

    with _only_builder(folder) as is_alone, ThreadPoolExecutor() as workers:
        libraries = list(workers.map(compile_level, levels))
        for level in levels if is_alone else ():
            shutil.rmtree(_kept(folder, level, compiler), ignore_errors=True)
    return libraries


def _compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler found (g++, c++ or $CXX)")
    return compiler


def _find(level: Level) -> Library | None:
    prebuilt = PREBUILT / library_name(level)
    if prebuilt.exists():
        return Library(prebuilt, "prebuilt")
    compiler = find_compiler()
    name = f"{_stem(level)}-*.so" if compiler is None else _cached_name(level, compiler)
    for path in sorted(_cache_folder().glob(name)):
        return Library(path, "cached")
    return None


def prebuilt_levels() -> tuple[Level, ...]:
    """Return the levels whose libraries the installed wheel brings, lowest first; none from sources."""
    return tuple(level for level in LEVELS if (PREBUILT / library_name(level)).exists())


def library_name(level: Level) -> str:
    """Return the file name of a level's prebuilt library."""
    return f"{_stem(level)}.so"


def _stem(level: Level) -> str:
    return f"kernels-{level.name}-{_source_hash(level)}"


def _cached_name(level: Level, compiler: Compiler) -> str:
    return f"{_stem(level)}-{hashlib.sha256(compiler.version.encode()).hexdigest()[:8]}.so"


def _kept(folder: Path, level: Level, compiler: Compiler) -> Path:
    return folder / (_KEPT_PREFIX + Path(_cached_name(level, compiler)).stem)


@cache
def _source_hash(level: Level) -> str:
    key = hashlib.sha256(repr((BUILD_KEY, level.flags)).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        key.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return key.hexdigest()[:16]


@contextmanager
def _only_builder(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock: processes that start at once compile once. It ends with its process.

    Yields whether there is one: on a file system without locks each compiles, and the last library stays.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process compiles the CPU kernels: waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        _remove_leftovers(folder)
        yield True
    finally:
        os.close(handle)


def _remove_leftovers(folder: Path) -> None:
    """Remove what builds that were killed worked on, and units of other sources."""
    current = tuple(f"{_KEPT_PREFIX}{_stem(level)}-" for level in (*LEVELS, EMULATED))
    for left in (*folder.glob(f"{SCRATCH_PREFIX}*"), *folder.glob(f"{_KEPT_PREFIX}*")):
        if not left.name.startswith(current):
            shutil.rmtree(left, ignore_errors=True)


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
