"""Rank 0 is killed: the others end, and nothing is left in the folder for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints import build
from tests.engine.ranks.processes import rank_processes

SCRIPT = """
import sys
from stemma import LLM
LLM(sys.argv[1], tensor_parallel_size=2, kv_cache_memory="1MB")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_engine_leaves_no_folder(tmp_path: Path) -> None:
    checkpoint, folder = build("qwen3", tmp_path / "model"), tmp_path / "temporary"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoint)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert [path.name for path in folder.glob("stemma-ranks-*")] != []
    [follower] = rank_processes(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while list(folder.glob("stemma-ranks-*")) or Path(f"/proc/{follower}/cmdline").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdout.close()
