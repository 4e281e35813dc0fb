"""The command: prepare the model, start the real server on loopback, run the steps, stop it."""

from __future__ import annotations

import asyncio
import tempfile
import time

from rich.console import Console

from stemma.cli.client import first_model, make_http
from stemma.cli.demo.stage import Stage
from stemma.cli.demo.steps import STEPS
from stemma.cli.progress import open_progress
from stemma.cli.server_process import ServerProcess
from stemma.native.library import prepare_kernels

_REAL_FLAGS = ("--kv-cache-memory", "140MB", "--host-cache", "280MB", "--disk-cache-size", "700MB")
"""A device tier with room for the blocks of the first steps (95), and little more."""
_RANDOM_FLAGS = ("--kv-cache-memory", "40MB", "--host-cache", "200MB", "--disk-cache-size", "400MB")
"""The same for the random model, whose tokens are shorter and whose blocks are smaller."""


def command() -> None:
    """Show the prefix cache at work on a small model, in under a minute."""
    console = Console(highlight=False)
    started = time.perf_counter()
    prepare_kernels()
    with open_progress("preparing the model (once on a machine)"):
        from stemma.model.load.demo import demo_model

        model = demo_model()
    if model.note is not None:
        console.print(f"[yellow]{model.note}[/]", soft_wrap=True)
    flags = _REAL_FLAGS if model.is_real else _RANDOM_FLAGS
    with tempfile.TemporaryDirectory(prefix="stemma-demo-") as directory:
        server = ServerProcess(model.path, (*flags, "--block-size", "64", "--disk-cache", directory))
        with console.status("starting the server"):
            server.start()
        try:
            console.print(f"[dim]{server.summary}[/]\nServing on [bold]{server.url}[/]", soft_wrap=True)
            asyncio.run(_run(console, server))
        finally:
            server.stop()
    seconds = time.perf_counter() - started
    console.print(
        f"\nDone in {seconds:.0f} s. Next: [bold]stemma chat demo --temperature 0.2[/] or "
        "[bold]stemma serve MODEL[/]."
    )


async def _run(console: Console, server: ServerProcess) -> None:
    http = make_http(server.url)
    stage = Stage(console, server, http, await first_model(http))
    try:
        await stage.complete("warm-up", "Hello")
        for step in STEPS:
            await step(stage)
    finally:
        await stage.http.aclose()
