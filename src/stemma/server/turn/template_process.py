"""Chat templates of clients, rendered in a process of their own (`--trust-request-chat-template`).

Jinja's sandbox keeps a template from the interpreter, not from endless loops or gigabytes. The process has a
limit of memory and is killed at its time limit; the next template gets a new one.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stemma.errors import InvalidRequest, TookTooLong

_LENGTH = struct.Struct(">I")
_PASSED_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "HOME")
"""The process gets no others: keys may be among them."""
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """The fields that a template renders."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    arguments: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class TemplateProcess:
    """Renders one template at a time. Methods are for one event loop."""

    def __init__(self, limit_s: float, max_chars: int, tokens: Mapping[str, str]) -> None:
        self._limit_s = limit_s
        self._max_chars = max_chars
        self._tokens = dict(tokens)
        """Special tokens by name, e.g. ``bos_token``."""
        self._process: asyncio.subprocess.Process | None = None
        self._is_warm = False
        self._turn = asyncio.Lock()

    async def render(self, template: str, conversation: TemplateFields) -> str:
        """Return the prompt. Raises InvalidRequest if the template fails, TookTooLong if it is too slow."""
        job = {
            "template": template,
            "messages": list(conversation.messages),
            "tools": None if conversation.tools is None else list(conversation.tools),
            "arguments": {**self._tokens, **conversation.arguments},
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            "max_chars": self._max_chars,
            "limit_s": self._limit_s,
        }
        content = json.dumps(job).encode()
        async with self._turn:
            try:
                answer = await self._ask(content)
            except BaseException:
                self.close()
                raise
        if "error" in answer:
            message = f"chat_template: {answer['error']}"
            raise InvalidRequest(message, param="chat_template")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """Kill the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None
        self._is_warm = False

    async def _ask(self, content: bytes) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        limit_s = self._limit_s + (0.0 if self._is_warm else _START_TIMEOUT_S)
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(_LENGTH.pack(len(content)) + content)
                await process.stdin.drain()
                head = await process.stdout.readexactly(_LENGTH.size)
                answer: dict[str, Any] = json.loads(await process.stdout.readexactly(_LENGTH.unpack(head)[0]))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise TookTooLong(
                f"chat_template: rendering took more than {self._limit_s:g} s, or too much memory",
                param="chat_template",
            ) from error
        self._is_warm = True
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self.close()
            environ = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "stemma.server.turn.template_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )
        return self._process
