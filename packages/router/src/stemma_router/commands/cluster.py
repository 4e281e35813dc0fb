"""`stemma cluster`: several engines of one model, started from one file (docs/how-to/fleet.md)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stemma.cli.ready_line import ready_line
from stemma.config.settings import Settings
from stemma.errors import ConfigError
from stemma_router.cluster_file import ClusterFile, Replicas, read_cluster_file

if TYPE_CHECKING:
    from types import FrameType

app = typer.Typer(no_args_is_help=True, help="Several engines of one model, started from one file.")

Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Use a Ray without a token: whoever reaches it runs code."),
]
ClusterPath = Annotated[Path, typer.Argument(help="The cluster file, YAML.", exists=True, dir_okay=False)]


@app.command("deploy")
def deploy_command(file: ClusterPath, insecure: Insecure = False) -> None:
    """Start replicas on Ray Serve. Once more, or SIGHUP: replace them one by one. Ctrl-C ends them."""
    serve_replicas(lambda: read_cluster_file(file, os.environ), insecure=insecure)


@app.command("up")
def up_command(file: ClusterPath) -> None:
    """Start prefill and decode engines on this machine, and the proxy before them. Ctrl-C ends them."""
    from stemma_router.commands.prefill_decode import run_prefill_decode

    run_prefill_decode(read_cluster_file(file, os.environ))


def serve_settings(settings: Settings, count: int) -> None:
    """Serve `count` replicas of what the settings describe (`stemma serve --replicas`)."""
    serve_replicas(lambda: ClusterFile(settings=settings, replicas=Replicas(count=count)))


def serve_replicas(read: Callable[[], ClusterFile], *, insecure: bool = False) -> None:
    """Serve the replicas that `read` describes; on a Ray started here until a signal. Raises ConfigError.

    `insecure`: a Ray that runs already needs no token.
    """
    cluster = read()
    if cluster.replicas is None:
        raise ConfigError("this file has no replicas: `stemma cluster up` starts prefill and decode")
    if find_spec("ray") is None or find_spec("zmq") is None:
        raise ConfigError("replicas need Ray Serve: pip install 'stemma-router[ray]'")
    from stemma_router.replicas import keep_ray_local, send_rays_token

    if cluster.replicas.ray.address is None:
        keep_ray_local()
    elif not insecure:
        send_rays_token()
    from stemma_router.replicas import application

    console = Console(soft_wrap=True, highlight=False)
    cluster = application.check_cluster(cluster)
    try:
        application.start_ray(cluster.replicas or Replicas(count=1), insecure=insecure)
        signals = _Signals()  # now: Ray has set handlers of its own
        application.deploy(cluster)
        server = cluster.settings.server
        is_ours = cluster.replicas is not None and cluster.replicas.ray.address is None
        hint = "Ctrl-C stops, SIGHUP replaces the replicas" if is_ours else "runs on in Ray"
        console.print(ready_line(f"http://{server.host}:{server.port}", hint))
        while is_ours and signals.wait() == signal.SIGHUP:
            try:
                application.deploy(application.check_cluster(read()))
                console.print("[bold green]Replaced.[/]")
            except ConfigError as error:
                console.print(f"[red]error: {error}; the replicas run on as they are[/]")
    finally:
        application.stop(cluster)


class _Signals:
    """Signals of the process, one after the other."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._numbers: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def wait(self) -> int:
        """Return the next signal's number."""
        while not self._numbers:
            self._came.wait(1.0)
            self._came.clear()
        return self._numbers.pop(0)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        self._came.set()
