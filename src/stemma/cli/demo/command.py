"""The command: build the model, start the real server on loopback, run the steps, stop it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from rich.console import Console

from stemma.cli.client import first_model, make_http
from stemma.cli.demo.stage import Stage
from stemma.cli.demo.steps import STEPS
from stemma.cli.server_process import ServerProcess

_HIDDEN_SIZE = 384
_NUM_LAYERS = 6
_FLAGS = ("--block-size", "64", "--kv-cache-memory", "40MB", "--host-cache", "80MB")
"""A device tier with room for all that the first steps leave behind (100 blocks), and not much more."""


def command() -> None:
    """Show the prefix cache at work: no download, under a minute."""
    console = Console(highlight=False)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stemma-demo-") as directory:
        model = _build_model(console, Path(directory) / "demo-model")
        disk = ("--disk-cache", f"{directory}/disk", "--disk-cache-size", "200MB")
        server = ServerProcess(model, (*_FLAGS, *disk))
        with console.status("starting the server"):
            server.start()
        try:
            console.print(f"[dim]{server.summary}[/]\nServing on [bold]{server.url}[/]", soft_wrap=True)
            asyncio.run(_run(console, server))
        finally:
            server.stop()
    seconds = time.perf_counter() - started
    console.print(f"\nDone in {seconds:.0f} s. With your own model: [bold]stemma serve MODEL[/]")


def _build_model(console: Console, path: Path) -> Path:
    """Write the model; its text is nonsense, but all that the cache sees is real."""
    with console.status("building a small model with random weights (nothing is downloaded)"):
        from stemma.model.tiny import write_tiny_model

        return write_tiny_model(path, hidden_size=_HIDDEN_SIZE, num_layers=_NUM_LAYERS)


async def _run(console: Console, server: ServerProcess) -> None:
    http = make_http(server.url)
    stage = Stage(console, server, http, await first_model(http))
    try:
        await stage.complete("warm-up", "Hello")
        for step in STEPS:
            await step(stage)
    finally:
        await stage.http.aclose()
