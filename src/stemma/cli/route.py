"""`stemma route`: a proxy in front of servers with --role prefill and --role decode."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from rich.console import Console


def command(
    prefill: Annotated[list[str], typer.Option(metavar="URL", help="Prefill server; may be repeated.")],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="Decode server; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8080,
) -> None:
    """Send each request to a prefill server and then to a decode server (docs/tiers.md)."""
    import uvicorn

    from stemma.cli.serve import READY
    from stemma.server.planes import url_of
    from stemma.server.route import create_route_app
    from stemma.server.runtime import listen

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    app = create_route_app(prefill, decode)
    with listen(host, port) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"[bold green]{READY}[/] {url_of(listener)}  [dim](Ctrl-C stops)[/]")
        server.run(sockets=[listener])
