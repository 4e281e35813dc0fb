"""From C++ sources to one shared library per instruction-set level.

A library is looked for beside the package (a wheel brings them prebuilt), then in the user's cache
(`$XDG_CACHE_HOME/stemma`, default `~/.cache/stemma`), and is compiled into the cache if neither has it. Its
name holds a hash of sources and flags; in the cache also one of the compiler. Nothing depends on the machine
that compiles: a library runs wherever the processor has its level.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from stemma.config.folders import cache_folder
from stemma.native.levels import Level

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel puts its libraries."""
_MAIN = "kernels.cpp"
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno"),
    *("-ffp-contract=off", "-Wno-psabi", "-w"),
)
_COMPILE_TIMEOUT_S = 300.0

Origin = Literal["prebuilt", "cached", "compiled"]


class BuildFailed(Exception):
    """There is no library and none could be built; the message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library and where it came from."""

    path: Path
    origin: Origin


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler on this machine."""

    path: str
    version: str
    """The first line it prints about itself."""


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
    _compile(level, compiler, target)
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
    _compile(level, compiler, target)
    return target


def library_name(level: Level) -> str:
    """Return the file name of a level's prebuilt library."""
    return f"{_stem(level)}.so"


def _stem(level: Level) -> str:
    return f"kernels-{level.name}-{_source_hash(level)}"


@cache
def _source_hash(level: Level) -> str:
    folder = Path(__file__).parent
    key = hashlib.sha256(repr((_FLAGS, level.flags)).encode())
    for source in sorted([*folder.glob("*.h"), *folder.glob("*.cpp")]):
        key.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return key.hexdigest()[:16]


def _compile(level: Level, compiler: Compiler, target: Path) -> None:
    source = Path(__file__).parent / _MAIN
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [compiler.path, *_FLAGS, *level.flags, str(source), *_openmp_runtime(), "-o", str(output)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
            output.replace(target)  # atomic: several processes may build at once
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines()
            raise BuildFailed(f"{compiler.path} fails: {lines[0] if lines else error}") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildFailed(f"{compiler.path} fails: {error}") from error


def _openmp_runtime() -> list[str]:
    """Return the OpenMP runtime that torch brings: with two in one process, threads wait for each other."""
    spec = find_spec("torch")  # the build of a wheel has no torch, and links the system's runtime
    folders = [] if spec is None else spec.submodule_search_locations or []
    runtimes = (Path(folder) / "lib" / "libgomp.so.1" for folder in folders)
    return [str(runtime) for runtime in runtimes if runtime.exists()]


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
