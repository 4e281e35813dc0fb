"""A wheel carries kernels of all levels, and a machine without a compiler runs them."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stemma.model.tiny import write_tiny_model
from stemma.native.building import find_compiler, library_name
from stemma.native.levels import LEVELS, available_levels

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="wheels carry kernels on Linux only")

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


def libraries(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name.rpartition("/")[2] for name in names if name.startswith("stemma/native/prebuilt/")}


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """Variables for a process that finds no compiler and no library of an earlier one."""
    (tmp_path / "empty").mkdir()
    return {"PATH": str(tmp_path / "empty"), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_kernels_of_a_wheel_run_without_a_compiler(tmp_path: Path, no_compiler: dict[str, str]) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=96, num_layers=2)
    wheel = build_wheel(tmp_path / "wheel")
    assert "-py3-none-linux_" in wheel.name
    assert {library_name(level) for level in available_levels()} <= libraries(wheel)

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Dependencies come from this environment. Stemma comes from the wheel, which is before them.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    environ = {**os.environ, **no_compiler, "PYTHONPATH": ""}

    doctor = subprocess.run(
        [python, "-m", "stemma", "doctor", "--json"], env=environ, capture_output=True, text=True, timeout=300
    )
    report = json.loads(doctor.stdout)
    assert report["kernels"]["compiler"] is None
    assert report["kernels"]["origin"] == "prebuilt"
    assert report["kernels"]["level"] == available_levels()[-1].name
    assert report["kernels"]["path"].startswith(str(packages))

    command = [python, "-c", GENERATE, str(model)]
    answers = [
        subprocess.run(command, env={**environ, **extra}, capture_output=True, text=True, timeout=300).stdout
        for extra in ({}, {"STEMMA_NATIVE": "0"})
    ]
    assert answers[0] == answers[1] != ""


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path, no_compiler: dict[str, str]) -> None:
    wheel = build_wheel(tmp_path / "wheel", **no_compiler)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == set()


def test_a_level_that_the_compiler_does_not_know_is_left_out(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo old; exit;; *-mamx-tile*) echo "unknown flag" >&2; exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
    )
    compiler.chmod(0o755)
    wheel = build_wheel(tmp_path / "wheel", CXX=str(compiler))
    assert libraries(wheel) == {library_name(level) for level in LEVELS if level.name != "amx"}
