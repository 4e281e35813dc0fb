"""The server under `numactl`: all of its memory follows the policy that an operator gives it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import pytest

from stemma.cli.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES_OF_KV = 500
"""Of 4 kB, in 2 MB of KV and more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "policy"),
    [("--interleave=all", "interleave:"), pytest.param("--membind=0", "bind:", marks=pytest.mark.slow)],
)
def test_weights_and_kv_follow_the_policy(
    option: str, policy: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("numactl") is None or not Path("/proc/self/numa_maps").exists():
        pytest.skip("needs numactl and a kernel with NUMA")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec numactl {option} {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(sys, "executable", str(python))
    with ServerProcess(tiny_model, ["--kv-cache-memory", "8MB", "--num-threads", "1"]) as server:
        body = {"model": "tiny", "prompt": "word " * 200, "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        lines = Path(f"/proc/{server.pid}/numa_maps").read_text("ascii").splitlines()
    anonymous = [line.split() for line in lines if " anon=" in line and "file=" not in line]
    pages = sum(int(word[5:]) for words in anonymous for word in words if word.startswith("anon="))
    assert pages > PAGES_OF_KV
    assert all(words[1].startswith(policy) for words in anonymous if "stack" not in words)
