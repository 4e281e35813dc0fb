"""`StemmaStorage` made and used through SGLang's own package, as far as it can be imported without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.checkpoints import build

pytestmark = pytest.mark.slow


def test_sglang_stores_and_reads_pages(tmp_path: Path):
    python = Path(os.environ.get("STEMMA_SGLANG_PYTHON", "/nowhere"))
    if not python.exists():
        pytest.skip("STEMMA_SGLANG_PYTHON names no interpreter that has sglang (docs/how-to/connectors.md)")
    checkpoint = build("llama", tmp_path / "model")
    script = Path(__file__).with_name("run_in_sglang.py")
    root = Path(__file__).parents[4]
    ended = subprocess.run(
        [str(python), str(script), str(checkpoint), str(tmp_path / "disk")],
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}:{root / 'packages/connect/src'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout.strip().endswith("sglang went through it"), ended.stderr[-4000:]
