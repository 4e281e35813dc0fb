"""The command itself: its options, and the server that it starts where it is given a checkpoint."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from stemma.cli.admin_client import DEFAULT_URL
from stemma.cli.chat.conversation import Conversation
from stemma.cli.chat.questions import open_questions
from stemma.cli.chat.session import ChatSession
from stemma.cli.client import first_model, make_http
from stemma.cli.progress import open_progress
from stemma.cli.server_process import ServerProcess
from stemma.config.settings import ModelSettings
from stemma.model.load.demo import is_demo
from stemma.model.load.located import located_model
from stemma.native.library import prepare_kernels
from stemma.terminal_text import visible


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A model to serve here for the chat, as for `serve`; or a server's URL."),
    ] = None,
    url: Annotated[str, typer.Option(help="A running server, unless a model is given.")] = DEFAULT_URL,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep questions for the next chat's Up key.")
    ] = True,
    api_key: Annotated[str | None, typer.Option(envvar="STEMMA_API_KEY", help="Bearer token.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="STEMMA_ADMIN_KEY", help="The server's admin key, for /tree.")
    ] = None,
) -> None:
    """Chat in the terminal; after each answer, how many tokens came from the cache."""
    console = Console(highlight=False)
    extra: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        extra["temperature"] = temperature
    with ExitStack() as stack:
        if model is not None and model.startswith(("http://", "https://")):
            url = model
        elif model is not None:
            server = _served_here(model)
            stack.callback(server.stop)
            url = server.url
        asyncio.run(_chat(console, url, api_key, admin_key, Conversation(system, extra), history))


def _served_here(model: str) -> ServerProcess:
    """Return a server of this machine that has started. Raises StemmaError."""
    settings = ModelSettings(path=Path(model))
    if not is_demo(settings.path):
        settings = located_model(settings)
    name = settings.served_name
    server = ServerProcess(settings.path, ("--served-name", name) if name else ())
    prepare_kernels()  # tells its own progress
    with open_progress("loading the model") as progress:
        server.start(on_line=progress)
    return server


async def _chat(
    console: Console,
    url: str,
    api_key: str | None,
    admin_key: str | None,
    conversation: Conversation,
    keep_history: bool,
) -> None:
    async with make_http(url, api_key) as http:
        name = await first_model(http)
        hint = "  /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves"
        console.print(Text.assemble((visible(name), "bold"), (hint, "dim")))
        with open_questions(keep_history) as questions:
            await ChatSession(console, http, name, conversation, questions, admin_key).run()
