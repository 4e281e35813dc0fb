"""Real servers for the tests of pools: each on a free loopback port, stopped by its own pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# The native client reads this as it is imported.
os.environ.setdefault("GLOG_minloglevel", "2")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"{process.args!r} doesn't listen")


class RedisServer:
    """`redis-server` or `valkey-server`, in memory only."""

    def __init__(self, directory: Path, *options: str) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            pytest.skip("no redis-server or valkey-server on this machine (apt-get install redis-server)")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", *options]
        self._directory = directory
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        await_port(self.port, self.process)

    def pause(self, seconds: float) -> None:
        """Answer no client for so long."""
        cli = self._command[0].replace("-server", "-cli")
        command = [cli, "-p", str(self.port), "client", "pause", str(int(1000 * seconds)), "all"]
        subprocess.run(command, check=True, capture_output=True)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class MooncakeMaster:
    """`mooncake_master` from the wheel, with short leases."""

    def __init__(self, *, client_ttl_s: int = 10) -> None:
        pytest.importorskip(
            "mooncake.store", reason="needs the mooncake extra and libibverbs1", exc_type=ImportError
        )
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._command = [
            str(Path(sys.executable).parent / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--default_kv_lease_ttl=1000",
            f"--client_ttl={client_ttl_s}",
        ]
        self.start()

    def config(self, segment_bytes: int = 32 << 20) -> dict[str, object]:
        """Return a `mooncake.json` for one client."""
        return {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment_bytes,
            "local_buffer_size": 16 << 20,
            "protocol": "tcp",
            "master_server_address": self.address,
        }

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await_port(self.port, self.process)

    def pause(self) -> None:
        """Stop answering, with all connections open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer again."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
