"""The tests of the kernels on arm64 processors that qemu emulates: what `.ci/arm64` set up runs them.

Kernels are compiled before, by this machine's cross compiler: a process that qemu emulates may hang when it
starts another one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stemma.native.levels import LEVELS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "arm64" / "python"
COMPILER = "aarch64-linux-gnu-g++"
LIMIT_S = 3000
BUILD = """
import sys
from pathlib import Path
from stemma.native.building import PREBUILT, build
from stemma.native.levels import level_named
for name in sys.argv[1:]:
    build([level_named(name)], PREBUILT)
"""
NAMES = ("products", "quantized_products", "selection", "recurrence", "masks", "copying")
RUNS = {
    "max,sve=off,pauth=off": (NAMES, "not portable"),  # what is off takes time alone
    # No bf16, no USDOT. Older processors than of Armv8.2 don't run torch.
    "cortex-a76": (("quantized_products",), "neon and (equal_to_the_dequantized or inputs_of_zero)"),
}
"""By qemu's name of a processor: files of tests, and which of them."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package and, as in a wheel, its libraries for arm64."""
    for command, debian in ((COMPILER, "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if shutil.which(command) is None:
            pytest.skip(f"needs {command} (Debian's package {debian})")
    if not PYTHON.exists():
        pytest.skip("needs an arm64 Python with torch: .ci/arm64 .venv/arm64 .venv/bin/python")
    folder = tmp_path_factory.mktemp("arm64")
    shutil.copytree(ROOT / "src" / "stemma", folder / "stemma", ignore=shutil.ignore_patterns("prebuilt"))
    names = [level.name for level in LEVELS if level.architecture == "arm64"]
    # Without this machine's packages: libraries must not be linked with its torch.
    subprocess.run(
        [sys.executable, "-S", "-c", BUILD, *names],
        env=os.environ | {"CXX": COMPILER, "PYTHONPATH": str(folder)},
        check=True,
        timeout=LIMIT_S,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("processor", RUNS)
def test_kernels_pass_on_arm64(package: Path, processor: str) -> None:
    names, which = RUNS[processor]
    files = [f"tests/native/test_{name}.py" for name in names]
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-o", "pythonpath=", *files, "-k", which],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{package}:{ROOT}", "STEMMA_TEST_CPU": processor, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
