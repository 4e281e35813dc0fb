"""``stemma chat``: talk to a server, or to a local checkpoint, and see what each turn reuses."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from stemma.cli.client import Answer, RequestFailed, first_model, make_http, stream_answer
from stemma.cli.server_process import ServerProcess

_HELP = "[dim]/reset starts over, /tree draws the cache, /quit (or Ctrl-D) leaves[/]"


def command(
    model: Annotated[
        str, typer.Argument(help="URL of a server, or a checkpoint directory to serve here for the chat.")
    ] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
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
    is_url = model.startswith(("http://", "https://"))
    with nullcontext() if is_url else console.status("loading the model"):
        server = None if is_url else ServerProcess(Path(model))
        if server is not None:
            server.start()
    try:
        http = make_http(server.url if server else model, api_key)
        conversation = Conversation(console, http, admin_key, system, extra)
        asyncio.run(conversation.run())
    finally:
        if server is not None:
            server.stop()


class Conversation:
    """The loop of question and answer."""

    def __init__(
        self,
        console: Console,
        http: httpx.AsyncClient,
        admin_key: str | None,
        system: str | None,
        extra: dict[str, Any],
    ) -> None:
        self._console = console
        self._http = http
        self._admin = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        self._start: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._extra = extra

    async def run(self) -> None:
        """Read questions until the user leaves."""
        async with self._http:
            model = await first_model(self._http)
            self._console.print(f"[bold]{model}[/]  {_HELP}")
            while True:
                try:
                    question = await asyncio.to_thread(self._console.input, "[bold cyan]you:[/] ")
                except (EOFError, KeyboardInterrupt):
                    return
                if question.strip() in ("/quit", "/exit"):
                    return
                await self._handle(question.strip(), model)

    async def _handle(self, question: str, model: str) -> None:
        if question == "/reset":
            self._messages = list(self._start)
        elif question == "/tree":
            response = await self._http.get("/admin/cache/tree", headers=self._admin)
            self._console.print(response.text, markup=False, soft_wrap=True)
        elif question:
            await self._ask(question, model)

    async def _ask(self, question: str, model: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "stream_options": {"include_usage": True}}
        self._console.print("[bold green]model:[/] ", end="")

        def show(text: str) -> None:
            self._console.out(text, end="", highlight=False)

        try:
            answer = await stream_answer(
                self._http, "/v1/chat/completions", {**body, **self._extra}, on_text=show
            )
        except RequestFailed as error:
            self._console.print(f"[red]{error}[/]")
            return
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._console.print(f"\n[dim]{describe(answer)}[/]")


def describe(answer: Answer) -> str:
    """Return e.g. ``412 prompt tokens, 384 cached (93 %); first token 0.04 s, then 31.0 tokens/s``."""
    parts = []
    if answer.num_prompt_tokens is not None:
        text = f"{answer.num_prompt_tokens} prompt tokens"
        if answer.num_cached_tokens is not None:
            share = 100 * answer.num_cached_tokens / max(1, answer.num_prompt_tokens)
            text += f", {answer.num_cached_tokens} cached ({share:.0f} %)"
        parts.append(text)
    speed = f"first token {answer.ttft_s:.2f} s"
    if answer.tpot_s:
        speed += f", then {1 / answer.tpot_s:.1f} tokens/s"
    parts.append(speed)
    return "; ".join(parts)
