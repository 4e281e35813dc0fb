"""Where a chat's questions come from: a line editor on a terminal, plain lines from a pipe."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from typing_extensions import override

from stemma.cli.chat.slash_commands import COMMANDS
from stemma.config.folders import state_folder


class Questions(Protocol):
    """Asks the user for the next question."""

    async def next(self) -> str | None:
        """Return what the user typed, which may be empty or have several lines; None: the user leaves."""


class PipedQuestions(Questions):
    """One question a line, from stdin."""

    @override
    async def next(self) -> str | None:
        line = await asyncio.to_thread(sys.stdin.readline)
        return line.rstrip("\n") if line else None


class EditedQuestions(Questions):
    """A line editor with history: Up and Down, Ctrl-R, several lines by Alt-Enter or by pasting them."""

    def __init__(self, history: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            HTML("<ansicyan><b>you:</b></ansicyan> "),
            multiline=True,
            key_bindings=_key_bindings(),
            history=history,
            completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
            complete_while_typing=False,
            prompt_continuation="     ",
        )

    async def next(self) -> str | None:
        """Read a line; Ctrl-C empties a line that has text, and leaves an empty one."""
        while True:
            try:
                return await self._session.prompt_async()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    return None


def _key_bindings() -> KeyBindings:
    """Let Enter send the question, also one of several lines, and Alt-Enter begin a line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


@contextmanager
def open_questions(keep_history: bool) -> Iterator[Questions]:
    """Yield the source of questions that fits stdin. History is kept only on a terminal, and if wanted."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield PipedQuestions()
        return
    file = history_file() if keep_history else None
    yield EditedQuestions(InMemoryHistory() if file is None else FileHistory(str(file)))


def history_file() -> Path | None:
    """Return the file of past questions, which only this user can read; None if it can't be written."""
    file = state_folder() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return None
    return file
