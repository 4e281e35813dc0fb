"""Servers and routers as processes of their own, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from stemma.cli.ready_line import READY

ROOT = Path(__file__).parents[4]
SOURCES = ":".join(map(str, (ROOT, ROOT / "src", *ROOT.glob("packages/*/src"))))
KEY = "s3cret"


class Process:
    """Something that prints where it is ready. Ended by `stop`, whatever state it is in."""

    def __init__(self, *command: str) -> None:
        environ = {**os.environ, "PYTHONPATH": SOURCES, "STEMMA_ADMIN_KEY": KEY}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if READY in line:
                self.url = line.split(READY)[1].split()[0]
                return
        raise AssertionError(f"{command} ended with {self.process.wait()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def sick_server() -> Process:
    return Process("packages.router.tests.routing.sick_server")


def router(*servers: str, flags: tuple[str, ...] = ()) -> Process:
    named = [part for server in servers for part in ("--server", server)]
    return Process("stemma", "route", "--port", "0", *named, *flags)


def become(server: Process, mode: str) -> int:
    """Let a server answer so from now on; return the requests for text that it got until now."""
    answer = httpx.post(f"{server.url}/mode/{mode}", timeout=10)
    generated: int = answer.json()["generated"]
    return generated


def health(router: Process) -> dict[str, object]:
    """Return what a router tells its operator."""
    answer = httpx.get(f"{router.url}/health", headers={"authorization": f"Bearer {KEY}"}, timeout=10)
    told: dict[str, object] = answer.json()
    return told
