"""A server that another process started ends with it, even where that one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stemma.cli.server_process import ServerProcess
from stemma.errors import StemmaError

STARTER = """
import sys
from pathlib import Path
from stemma.cli.server_process import ServerProcess
server = ServerProcess(Path(sys.argv[1]), ("--kv-cache-memory=2MB", "--num-threads=1"), Path(sys.argv[2]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_ends_with_its_parent_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tiny_model), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert runs(pid)
    assert os.getsid(pid) != os.getsid(parent.pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline, "it runs on alone"
        time.sleep(0.05)
    assert log.exists()


def test_a_server_that_does_not_start_says_why_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with pytest.raises(StemmaError, match=r"did not start: (.|\n)*none"):
        ServerProcess(tmp_path / "none", log=log).start()
    assert "none" in log.read_text()
