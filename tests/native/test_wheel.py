"""A wheel carries kernels of all levels; a machine without a compiler installs it and runs its commands."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from stemma.cli.ready_line import READY
from stemma.model.files.tiny import write_tiny_model
from stemma.native.building import find_compiler, find_or_build, library_name
from stemma.native.levels import LEVELS, Level, architecture, available_levels, level_named

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="wheels carry kernels on Linux only")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

GENERATE = """
import sys
from stemma import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_memory="2MB", block_size=16, num_threads=1, dtype="float32")
[answer] = llm.generate([[5, 6, 7, 8, 9, 10]], SamplingParams(max_tokens=8, temperature=0.0))
print(answer.completions[0].token_ids)
"""


def build_wheel(folder: Path, **environ: str) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environ},
        check=True,
        capture_output=True,
        timeout=900,
    )
    [wheel] = folder.glob("*.whl")
    return wheel


def make_wheels(folder: Path) -> None:
    """`make wheels`, with what this environment has to build them."""
    variables = (f"VENV={sys.prefix}", f"DIST={folder}")
    done = subprocess.run(
        ["make", "wheels", *variables],
        cwd=ROOT,
        env=os.environ | {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def libraries(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name.rpartition("/")[2] for name in names if name.startswith("stemma/native/prebuilt/")}


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """Variables for a process that finds no compiler and no library of an earlier one."""
    (tmp_path / "empty").mkdir()
    return {"PATH": str(tmp_path / "empty"), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@dataclass(frozen=True)
class Installed:
    """A clean environment with the wheel in it."""

    wheel: Path
    python: Path
    packages: Path
    environ: dict[str, str]

    def run(self, *arguments: str, **extra: str) -> str:
        done = subprocess.run(
            [self.python, *arguments],
            env={**self.environ, **extra},
            cwd=self.packages,  # not the sources' folder
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-m", "stemma", *arguments],
            env=self.environ,
            cwd=self.packages,
            text=True,
            **streams,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    make_wheels(folder / "dist")
    [wheel] = (folder / "dist").glob("stemma_llm-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    # Python 3.11 puts an old one there, before that of the dependencies.
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # Dependencies come from here, without what .pth files add: Stemma's packages come from the wheels alone.
    (folder / "dependencies").mkdir()
    for package in Path(typer.__file__).parents[1].iterdir():
        if not package.name.startswith("stemma") and package.suffix != ".pth":
            (folder / "dependencies" / package.name).symlink_to(package)
    (packages / "dependencies.pth").write_text(f"{folder / 'dependencies'}\n")
    wheels = sorted(map(str, (folder / "dist").iterdir()))
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "-c",
        str(ROOT / "constraints.txt"),
        *wheels,
    ]
    subprocess.run(install, check=True, timeout=300)
    (folder / "empty").mkdir()
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CXX", "PYTHONPATH", "STEMMA_ISA", "STEMMA_NATIVE")
    }
    environ |= {"PATH": str(folder / "empty"), "XDG_CACHE_HOME": str(folder / "cache"), "TERM": "xterm"}
    return Installed(wheel, python, packages, environ)


@pytest.mark.slow
@needs_compiler
def test_kernels_of_a_wheel_run_without_a_compiler(tmp_path: Path, installed: Installed) -> None:
    assert re.search(r"-py3-none-manylinux_\d+_\d+_\w+\.whl$", installed.wheel.name)
    assert libraries(installed.wheel) == {library_name(level) for level in LEVELS if is_built(level)}
    assert installed.run("-c", "import stemma; print(stemma.__file__)").startswith(str(installed.packages))

    report = json.loads(installed.run("-m", "stemma", "doctor", "--json"))["kernels"]
    assert report["compiler"] is None
    assert report["origin"] == "prebuilt"
    assert report["level"] == available_levels()[-1].name
    assert report["path"].startswith(str(installed.packages))

    model = write_tiny_model(tmp_path / "model", hidden_size=96, num_layers=2)
    answers = [installed.run("-c", GENERATE, str(model), **extra) for extra in ({}, {"STEMMA_NATIVE": "0"})]
    assert answers[0] == answers[1] != ""


@pytest.mark.slow
@needs_compiler
def test_wheels_of_all_packages_are_made_and_fit_each_other(installed: Installed) -> None:
    guests = {path.name for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").exists()}
    made = {path.name.partition("-")[0] for path in installed.wheel.parent.iterdir()}
    assert made == {"stemma_llm", *(f"stemma_{guest}" for guest in guests)}
    names = ", ".join(sorted(made - {"stemma_llm"}))
    assert installed.run("-c", f"import {names}; print(stemma_lab.__file__)").startswith(
        str(installed.packages)
    )
    commands = installed.run("-m", "stemma", "--help")
    assert {name for name in ("replay", "route", "certs") if name not in commands} == set()


@pytest.mark.slow
@needs_compiler
def test_the_demo_runs_from_a_wheel(installed: Installed) -> None:
    assert "Done in" in installed.run("-m", "stemma", "demo")


@pytest.mark.slow
@needs_compiler
def test_a_wheel_serves(installed: Installed) -> None:
    process = installed.start(
        "serve", "demo", "--port", "0", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        url = next(line for line in lines if line.startswith(READY)).removeprefix(READY).split()[0]
        body = {"prompt": "Hello", "max_tokens": 4, "model": "demo"}
        [model, *_] = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        answer = httpx.post(
            f"{url}/v1/completions", json={**body, "model": model["id"]}, timeout=60, trust_env=False
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
@needs_compiler
def test_chat_from_a_wheel_answers_in_a_terminal(installed: Installed) -> None:
    """What is typed is answered; the end of input leaves."""
    leader, follower = pty.openpty()
    process = installed.start(
        "chat", "demo", "--max-tokens", "8", stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown, deadline = b"", time.monotonic() + 240
    typed = [b"Hello\r", b"\x04"]
    quiet_since = time.monotonic()
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([leader], [], [], 0.5)[0]:
            try:
                shown += os.read(leader, 4096)
            except OSError:  # its side is closed
                break
            quiet_since = time.monotonic()
            if b"\x1b[6n" in shown[-64:]:  # a terminal is asked where its cursor is
                os.write(leader, b"\x1b[1;1R")
        elif typed and shown and time.monotonic() - quiet_since > 10:
            os.write(leader, typed.pop(0))
            quiet_since = time.monotonic()
    process.terminate()
    assert process.wait(60) == 0, shown.decode(errors="replace")
    assert not typed
    assert b"Hello" in shown
    os.close(leader)


def is_built(level: Level) -> bool:
    return level.architecture == architecture() or not level.features


def test_a_wheel_without_kernels_has_to_be_asked_for(tmp_path: Path, no_compiler: dict[str, str]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build_wheel(tmp_path / "wheel", **no_compiler)
    assert b"no C++ compiler found" in failed.value.stderr
    assert b"STEMMA_WHEEL_LEVELS" in failed.value.stderr
    wheel = build_wheel(tmp_path / "wheel", **no_compiler, STEMMA_WHEEL_LEVELS="none")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == set()


@needs_compiler
def test_a_level_that_does_not_compile_fails_the_build(tmp_path: Path) -> None:
    ready = find_or_build(level_named("portable")).path
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo old; exit;; *-mamx-tile*) echo "unknown flag" >&2; exit 1;; esac\n'
        f'for last; do :; done\ncp "{ready}" "$last"\n'
    )
    compiler.chmod(0o755)
    environ = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build_wheel(tmp_path / "wheel", **environ)
    assert b"level amx don't compile" in failed.value.stderr
    kept = {path.name for path in (tmp_path / "cache" / "stemma").glob("parts-*/kernels.o")}
    assert kept == {"kernels.o"}
    wheel = build_wheel(tmp_path / "wheel", **environ, STEMMA_WHEEL_LEVELS="portable,avx2")
    assert libraries(wheel) == {library_name(level_named(name)) for name in ("portable", "avx2")}
