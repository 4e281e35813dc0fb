"""`stemma config check` and `stemma serve` on the same file."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma.server import runtime


def check(file: Path) -> Result:
    return CliRunner().invoke(make_app(), ["config", "check", str(file)])


def serve(file: Path) -> Result:
    """Run `stemma serve`, here, on a file that it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "serve", lambda *_: pytest.fail("it serves"))
        patch.setattr(gc, "freeze", lambda: None)
        return CliRunner(env={"STEMMA_NUM_THREADS": "1"}).invoke(make_app(), ["serve", "--config", str(file)])
