"""`stemma route`: a proxy in front of equal servers, or of servers with --role prefill and --role decode."""

from __future__ import annotations

import logging
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from stemma.cli.ready_line import ready_line

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from stemma.config.server_settings import ServerSettings
    from stemma.model.text.tokenizer import Tokenizer


def command(
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,events=ZMQ[,replay=ZMQ]]",
            help="One of several equal servers (Stemma, vLLM, ...), with its KV events; may be repeated.",
        ),
    ] = None,
    servers: Annotated[
        Path | None,
        typer.Option(help="File with a server on each line; changes are taken up, at once on SIGHUP."),
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Prefill server; may be repeated.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Decode server; may be repeated.")
    ] = None,
    router: Annotated[str, typer.Option(help="How a server is chosen: docs/how-to/fleet.md")] = "cache-aware",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Checkpoint of the served model; default: ask the servers.")
    ] = None,
    endpoint_picker: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Answer Envoy's endpoint picker calls (gRPC) there too."),
    ] = None,
    endpoint_picker_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate for these calls; most gateways use TLS."),
    ] = None,
    endpoint_picker_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8080,
    max_body_bytes: Annotated[str, typer.Option(help="Largest request body.")] = "64MiB",
    body_memory: Annotated[
        str, typer.Option(help="Bodies passed on at once; one key may hold half.")
    ] = "512MiB",
    answer_memory: Annotated[
        str, typer.Option(help="Whole answers held until clients have read them; one key may hold half.")
    ] = "512MiB",
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections.")] = 1024,
    send_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Who reads less than 32 KiB in so long loses the connection.")
    ] = 30.0,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="STEMMA_ADMIN_KEY", help="Shows servers and counters on /health to whoever has it."
        ),
    ] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="File that holds it instead.")] = None,
) -> None:
    """Send each request to the best of equal servers, or to a prefill and then to a decode server."""
    from stemma.config.server_settings import ServerSettings
    from stemma.config.sizes import parse_size
    from stemma.config.words import check_key, read_key
    from stemma.errors import ConfigError
    from stemma_router.routing.fleet import create_fleet_app
    from stemma_router.routing.picker.options import PickerOptions
    from stemma_router.routing.relay import RouteOptions
    from stemma_router.routing.route import create_route_app
    from stemma_router.routing.server_list import ServerList

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = ServerSettings(
        host=host,
        port=port,
        max_connections=max_connections,
        max_body_bytes=parse_size(max_body_bytes),
        send_timeout_s=send_timeout_s,
    )
    key = read_key(None if admin_key is None else check_key(admin_key), admin_key_file, "admin_key")
    options = RouteOptions(
        host, settings.max_body_bytes, key, parse_size(body_memory), answer_memory=parse_size(answer_memory)
    )
    is_fleet = bool(server) or servers is not None
    if is_fleet and (prefill or decode):
        raise ConfigError("give --server or --servers, or --prefill and --decode")
    if is_fleet:
        source = ServerList(server or [], servers)
        picker = None
        if endpoint_picker is not None:
            picker = PickerOptions(endpoint_picker, endpoint_picker_cert, endpoint_picker_key)
        app = create_fleet_app(
            source, router, options=options, tokenizer=_tokenizer(tokenizer), endpoint_picker=picker
        )
    else:
        app = create_route_app(prefill or [], decode or [], options=options)
    serve_proxy(app, settings)


def serve_proxy(app: FastAPI, settings: ServerSettings) -> None:
    """Serve a proxy's application on the address that the settings name, until a signal."""
    import uvicorn

    from stemma.server.transport.acceptor import AdmittingServer
    from stemma.server.transport.connections import make_protocol, open_sockets, quiet_logs
    from stemma.server.transport.planes import listen, url_of

    quiet_logs()
    with listen(settings.host, settings.port) as listener:
        config = uvicorn.Config(
            app,
            log_config=None,
            loop="asyncio",
            access_log=False,
            http=make_protocol(settings),
            ws="none",
            server_header=False,
            timeout_keep_alive=math.ceil(settings.keep_alive_s),
        )
        [sockets] = open_sockets(settings)
        proxy = AdmittingServer(config, sockets, settings.header_timeout_s)
        console = Console(soft_wrap=True, highlight=False)
        console.print(ready_line(url_of(listener), "Ctrl-C stops"))
        proxy.run(sockets=[listener])


def end_by_exception() -> None:
    """Let signals end this process by an exception, so that what it started ends too.

    uvicorn raises the signal that ended it once more.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _tokenizer(path: Path | None) -> Tokenizer | None:
    if path is None:
        return None
    from stemma.model.load.located import located_path
    from stemma.model.text.tokenizer import Tokenizer

    return Tokenizer(located_path(path))
