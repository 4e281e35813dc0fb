"""What `make` installs first, with a pip that only writes down what it is asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
[TORCH] = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
PYTHON = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in *+cpu*) exit {code};; esac
"""


def asked(tmp_path: Path, *, has_cpu_build: bool) -> list[str]:
    """Run `make .base` in a fake environment; return what its Python was called with."""
    log, python = tmp_path / "log", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(log=log, code=0 if has_cpu_build else 1))
    python.chmod(0o700)
    subprocess.run(
        ["make", f"VENV={tmp_path / 'venv'}", str(tmp_path / "venv" / ".base")],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    deadline = time.monotonic() + 10
    while "stemma.native.ahead" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)  # it runs beside pip
    return log.read_text().splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with a GPU torch for CUDA is installed")
@pytest.mark.parametrize("has_cpu_build", [True, False])
def test_torch_for_cpus_is_taken_where_an_index_has_it(tmp_path: Path, has_cpu_build: bool) -> None:
    lines = asked(tmp_path, has_cpu_build=has_cpu_build)
    torch = [line.split()[-1] for line in lines if line.split()[-1].startswith("torch==")]
    assert torch == [f"{TORCH}+cpu", *([] if has_cpu_build else [TORCH])]
    assert any("stemma.native.ahead" in line for line in lines)  # kernels are compiled meanwhile
