"""Compiles the C++ sources into one library: translation units side by side, then one link.

What is in a unit, and why, stands in units.h. Each is a process of the compiler; all builds of this process
together run no more of them than there are cores. A unit that is compiled is kept: the next build goes on
with those of one that failed or was killed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stemma.native.cores import usable_cores
from stemma.native.levels import Level
from stemma.native.structures import LAYOUTS

SOURCES = Path(__file__).parent
UNITS = (
    *("kernels", "products_bf16", "products_int8"),
    *("attention_bf16", "products_float", "attention_float"),
)
"""Names of the translation units' files, the longest first: so none is left alone at the end."""
SCRATCH_PREFIX = "building-"
"""Prefix of folders that a build works in, beside its result."""
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno"),
    *("-ffp-contract=off", "-Wno-psabi", "-w"),
)
_TUNING = (
    # Of -O3 kernels need vectors and unrolling. The rest copies code: a third of the compiler's time.
    *("-fno-unswitch-loops", "-fno-ipa-cp-clone", "-fno-tree-partial-pre", "-fno-split-loops"),
    *(
        "-fno-predictive-commoning",
        "-fno-tree-loop-distribution",
        "-fno-gcse-after-reload",
        "-fno-split-paths",
    ),
    *("-fno-loop-interchange", "-fno-loop-unroll-and-jam", "-fno-version-loops-for-strides"),
    *("--param", "max-inline-insns-auto=15", "--param", "max-inline-insns-single=70"),
    *("--param", "inline-min-speedup=30"),
)
"""For GCC; other compilers don't know these flags."""
BUILD_KEY = repr((_FLAGS, _TUNING, UNITS, LAYOUTS))
"""Differs where the same sources would make another library."""
MOST_CPU_S = 3600
"""Of a process of the compiler, far above what a slow machine takes. A wall clock would bound a busy one."""
_cores = threading.BoundedSemaphore(usable_cores())


class BuildFailed(Exception):
    """There is no library and none could be built; the message says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler on this machine."""

    path: str
    version: str
    """The first line it prints about itself."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for all levels; GCC's first line names its command, clang's its name."""
        return _FLAGS if "clang" in self.version.lower() else (*_FLAGS, *_TUNING)


def compile_library(
    level: Level,
    compiler: Compiler,
    target: Path | None,
    kept: Path,
    on_unit: Callable[[], None] = lambda: None,
) -> None:
    """Compile the library of `level` to `target`, which appears whole or not at all. Raises BuildFailed.

    Units that the folder `kept` lacks are compiled into it, one by one; without `target` that is all.
    `on_unit` is called, by the calling thread, for each unit that is there.
    """
    objects = {unit: kept / f"{unit}.o" for unit in UNITS}
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=SCRATCH_PREFIX) as name:
        scratch = Path(name)
        (scratch / "layouts.h").write_text(LAYOUTS)
        compilation = _Processes(compiler.path, scratch)
        flags = (*compiler.flags, *level.flags, f"-I{scratch}")
        with ThreadPoolExecutor(len(UNITS), "stemma-compile") as threads:
            runs = [
                threads.submit(compilation.make, made, *flags, "-c", str(SOURCES / f"{unit}.cpp"))
                for unit, made in objects.items()
            ]
            try:
                for run in as_completed(runs):
                    run.result()
                    on_unit()
            except BaseException:  # a unit failed, or Ctrl-C: what the others make isn't wanted
                compilation.stop()
                raise
        if target is not None:
            linked = ("-shared", "-fopenmp", *map(str, objects.values()), *_openmp_runtime())
            compilation.make(target, *linked)


class _Processes:
    """The compiler's processes of one build."""

    def __init__(self, path: str, scratch: Path) -> None:
        self._path, self._scratch = path, scratch
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def make(self, output: Path, *arguments: str) -> None:
        """Have the compiler make `output`, unless it is there; it appears whole. Raises BuildFailed."""
        begun = self._scratch / output.name
        limited = f'ulimit -S -t {MOST_CPU_S} 2>/dev/null; exec "$0" "$@"'
        with _cores:
            if output.exists():
                return
            try:
                with self._lock:
                    if self._is_stopped:
                        raise BuildFailed("the build was stopped")
                    process = subprocess.Popen(
                        ["/bin/sh", "-c", limited, self._path, *arguments, "-o", str(begun)],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                    )
                    self._running.add(process)
                self._wait(process)
                begun.stat()  # a compiler that says nothing may have written nothing
                output.parent.mkdir(exist_ok=True)
                shutil.move(begun, output)
            except (OSError, subprocess.SubprocessError) as error:
                raise BuildFailed(f"{self._path} fails: {error}") from error

    def _wait(self, process: subprocess.Popen[str]) -> None:
        try:
            _, errors = process.communicate()
        finally:
            process.kill()
            with self._lock:
                self._running.discard(process)
        if process.returncode != 0:
            lines = errors.strip().splitlines() or [f"it ended with {process.returncode}"]
            reason = next((line for line in lines if "error:" in line), lines[0])
            raise BuildFailed(f"{self._path} fails: {reason}")

    def stop(self) -> None:
        """End what runs; nothing more starts."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.kill()


def _openmp_runtime() -> list[str]:
    """Return the OpenMP runtime that torch brings: with two in one process, threads wait for each other."""
    spec = find_spec("torch")  # the build of a wheel has no torch, and links the system's runtime
    folders = [] if spec is None else spec.submodule_search_locations or []
    runtimes = (Path(folder) / "lib" / "libgomp.so.1" for folder in folders)
    return [str(runtime) for runtime in runtimes if runtime.exists()]
