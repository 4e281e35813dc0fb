"""The script in examples/ runs against the server as it stands."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "triton_client.py"


def test_the_script_runs(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tritonclient")
    monkeypatch.setattr(sys, "argv", [SCRIPT.stem, url])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "ready: True" in capsys.readouterr().out
