"""`stemma route`: a proxy in front of servers with --role prefill and --role decode."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    prefill: Annotated[list[str], typer.Option(metavar="URL", help="Prefill server; may be repeated.")],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="Decode server; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8080,
    max_body_bytes: Annotated[str, typer.Option(help="Largest request body.")] = "64MiB",
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections.")] = 1024,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="STEMMA_ADMIN_KEY", help="Shows servers and counters on /health to who has it."),
    ] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="File that holds it instead.")] = None,
) -> None:
    """Send each request to a prefill server and then to a decode server (docs/tiers.md)."""
    import uvicorn

    from stemma.cli.serve import READY
    from stemma.config.settings import ServerSettings
    from stemma.config.sizes import parse_size
    from stemma.config.words import check_key, read_key
    from stemma.server.connections import ACCEPT_BURST, make_protocol, quiet_logs
    from stemma.server.planes import url_of
    from stemma.server.route import RouteOptions, create_route_app
    from stemma.server.runtime import listen

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = ServerSettings(
        host=host, max_connections=max_connections, max_body_bytes=parse_size(max_body_bytes)
    )
    key = read_key(None if admin_key is None else check_key(admin_key), admin_key_file, "admin_key")
    app = create_route_app(prefill, decode, options=RouteOptions(host, settings.max_body_bytes, key))
    quiet_logs()
    with listen(host, port) as listener:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=make_protocol(settings),
            ws="none",
            server_header=False,
            backlog=ACCEPT_BURST,
        )
        server = uvicorn.Server(config)
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"[bold green]{READY}[/] {url_of(listener)}  [dim](Ctrl-C stops)[/]")
        server.run(sockets=[listener])
