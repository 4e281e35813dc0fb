"""The dialogue of MindIE's manual: its config.json, its certificates, its two curls to the letter."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stemma.model.files.tiny import write_tiny_model

PRINTED = Path(__file__).parents[3] / "tests" / "data" / "mindie"
SOURCE = Path(__file__).parents[3] / "src"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("curl") is None or shutil.which("bash") is None, reason="no curl, no bash"
    ),
]


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def daemon(root: Path, fragment: str) -> Iterator[str]:
    """Run the daemon in an installation of MindIE's layout; yield what it said at the start."""
    if not all(map(is_free, (1025, 1026, 1027))):
        pytest.skip("another program has one of MindIE's ports 1025 to 1027")
    model = write_tiny_model(root / "weights", hidden_size=96, num_layers=2)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 32768}))
    (root / "conf").mkdir()
    fragment = re.sub(r'"modelWeightPath" : "[^"]*"', f'"modelWeightPath" : "{model}"', fragment)
    # A machine for tests has less memory than the manual's.
    fragment = fragment.replace('"cpuMemSize" : 5', '"cpuMemSize" : 0')
    fragment = fragment.replace('"npuMemSize" : -1', '"npuMemSize" : 1')
    (root / "conf" / "config.json").write_text("{" + fragment + "}", encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "STEMMA_NUM_THREADS": "1"}
    certs = [sys.executable, "-m", "stemma", "certs", "dev"]
    subprocess.run(certs, cwd=root, env=environ, check=True, capture_output=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "stemma_mindie.daemon"],
        cwd=root,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("Ready:"):
            break
    else:
        pytest.fail("".join(said))
    try:
        yield "".join(said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def printed(name: str) -> str:
    return (PRINTED / name).read_text(encoding="utf-8").rstrip().rstrip(",")


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Path]:
    with daemon(tmp_path, printed("prefix_cache_as_printed.txt")) as said:
        assert "accepted without effect: backendType\n" in said
        assert "enable_nz of models.deepseekv2 is not for qwen2" in said
        yield tmp_path


def run_curl(installation: Path, script: str) -> tuple[dict[str, str], dict[str, str]]:
    """Run a command of the manual in the installation; return body and headers."""
    # What a reader sees on the terminal is the body alone; curl's own file asks for the headers beside it.
    (installation / ".curlrc").write_text("silent\nshow-error\ndump-header = headers\n")
    environ = {**os.environ, "HOME": str(installation), "CURL_HOME": str(installation)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=installation, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = (installation / "headers").read_text().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    return json.loads(done.stdout), headers


def test_both_curls_to_the_letter(installation: Path) -> None:
    """The second round shares the first question: whole blocks, and the rest of it, are reused."""
    first_body, first = run_curl(installation, (PRINTED / "curl_round_1.sh").read_text())
    again_body, again = run_curl(installation, (PRINTED / "curl_round_1.sh").read_text())
    second_body, second = run_curl(installation, (PRINTED / "curl_round_2.sh").read_text())

    assert first_body.keys() == second_body.keys() == {"generated_text"}
    assert again_body == first_body, "a hit changes nothing"
    assert first["x-stemma-cached-tokens"] == "0"
    num_question = int(again["x-stemma-cached-tokens"]) + 1
    assert num_question > 128
    shared = int(second["x-stemma-cached-tokens"])
    assert num_question - 3 <= shared <= num_question

    script = (PRINTED / "curl_round_1.sh").read_text().replace("--cert client.pem --key client.key.pem", "")
    bare = subprocess.run(
        ["bash", "-c", script], cwd=installation, capture_output=True, text=True, timeout=60
    )
    assert bare.returncode != 0, "without a client certificate nothing is served"
    assert bare.stdout == ""


def test_the_pool_manuals_example_writes_blocks_to_a_pool(tmp_path: Path) -> None:
    """Its two faults corrected, with a pool that exists here; absent asyncWrite means synchronous writes."""
    (tmp_path / "pool.json").write_text(json.dumps({"path": str(tmp_path / "pool")}))
    fragment = printed("pool_as_printed.txt").replace(
        '"backend""kv_pool_backend_name"', '"backend":"directory"'
    )
    fragment = fragment.replace("/path/to/your/config/file", str(tmp_path / "pool.json")) + "}"
    # Sixteen devices of two machines: refused as they stand (tests/config/test_mindie.py).
    for name, printed_size in (("dp", 2), ("tp", 8), ("moe_ep", 4), ("moe_tp", 4)):
        fragment = fragment.replace(f'"{name}": {printed_size}', f'"{name}": 1')
    fragment = fragment.replace('"worldSize" : 8', '"worldSize" : 1')
    fragment = fragment.replace('"multiNodesInferEnabled" : true', '"multiNodesInferEnabled" : false')
    with daemon(tmp_path, fragment) as said:
        assert "pool directory" in said
        assert "npuDeviceIds" in said
        run_curl(tmp_path, (PRINTED / "curl_round_1.sh").read_text())
        assert [path for path in (tmp_path / "pool").rglob("*") if path.is_file()]
