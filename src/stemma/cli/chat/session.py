"""The loop of question and answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from stemma.cli.chat.conversation import Conversation
from stemma.cli.chat.questions import Questions
from stemma.cli.chat.slash_commands import COMMANDS, command_of
from stemma.cli.client import RequestFailed, StreamedAnswer, stream_answer
from stemma.terminal_text import visible, visible_lines

_SHOWN = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters would let a model's text move the cursor, or more, of whoever reads it."""


class ChatSession:
    """Asks for questions, shows answers as they come, and what of each prompt was reused."""

    def __init__(
        self,
        console: Console,
        http: httpx.AsyncClient,
        model: str,
        conversation: Conversation,
        questions: Questions,
        admin_key: str | None,
    ) -> None:
        self._console = console
        self._http = http
        self._model = model
        self._conversation = conversation
        self._questions = questions
        self._admin = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}

    async def run(self) -> None:
        """Answer questions until the user leaves."""
        while (line := await self._questions.next()) is not None:
            command = command_of(line)
            if command == "exit":
                return
            if command is not None:
                await self._obey(command)
            elif line.strip():
                await self._ask(line.strip())

    async def _obey(self, command: str) -> None:
        if command == "help":
            for name, does in COMMANDS.items():
                self._console.print(f"  /{name:<6} [dim]{does}[/]")
            self._console.print("  [dim]Alt-Enter begins a line, Enter sends; Up finds past questions[/]")
        elif command == "reset":
            self._conversation.reset()
            self._console.print("[dim]a new conversation[/]")
        elif command == "tree":
            await self._show_tree()
        else:
            names = ", ".join(f"/{name}" for name in COMMANDS)
            self._console.print(Text(f"/{command} is no command; there are {names}", style="yellow"))

    async def _show_tree(self) -> None:
        try:
            response = await self._http.get("/admin/cache/tree", headers=self._admin)
        except httpx.HTTPError as error:
            self._console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
            return
        self._console.print(visible_lines(response.text), markup=False, soft_wrap=True)

    async def _ask(self, question: str) -> None:
        self._console.print("[bold green]model:[/] ", end="")
        pieces: list[str] = []

        def show(text: str) -> None:
            pieces.append(text)
            self._console.out(text.translate(_SHOWN), end="", highlight=False)

        body = self._conversation.body(self._model, question)
        asking = asyncio.ensure_future(stream_answer(self._http, "/v1/chat/completions", body, on_text=show))
        with _stopped_by_interrupt(asking):
            await asyncio.wait([asking])
        self._end_turn(question, "".join(pieces), asking)

    def _end_turn(self, question: str, text: str, asked: asyncio.Future[StreamedAnswer]) -> None:
        if asked.cancelled():
            note = "stopped; what was said stays in the conversation" if text else "stopped"
        elif isinstance(error := asked.exception(), RequestFailed):
            self._console.print(f"{chr(10) if text else ''}{error}", style="red", markup=False)
            return
        else:
            note = describe(asked.result())
        if text or not asked.cancelled():
            self._conversation.add(question, text)
        self._console.print(Text(f"\n{visible(note)}", style="dim"))


@contextmanager
def _stopped_by_interrupt(asking: asyncio.Future[Any]) -> Iterator[None]:
    """Let Ctrl-C end an answer, and with it the request on the server, but not the chat."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    with suppress(NotImplementedError, ValueError, RuntimeError):  # another thread, or Windows
        loop.add_signal_handler(signal.SIGINT, asking.cancel)
    try:
        yield
    finally:
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)


def describe(answer: StreamedAnswer) -> str:
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
