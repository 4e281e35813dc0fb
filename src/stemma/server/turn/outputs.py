"""The outputs of a stream: read as they come, with what is said while there is nothing to read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from stemma.engine.api import PromptProgress, RequestOutput
from stemma.server.answers.usage import cached_header
from stemma.server.door.ledger import Reserved
from stemma.server.observe.collected import Collected
from stemma.server.transport.sse import event

PROGRESS_EVERY_S = 1.0

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Outputs of the engine with the number of their prompt. Their cache reports are the engine's: what a client
may see is in `Collected`."""
Waiting = Callable[[Sequence[PromptProgress]], bytes]
"""Says how far prompts have come whose answers haven't begun."""


def as_comment(prompts: Sequence[PromptProgress]) -> bytes:
    """Return a comment of server-sent events, which every client passes over."""
    processed = sum(one.num_processed_tokens for one in prompts)
    total = sum(one.num_prompt_tokens for one in prompts)
    cached = sum(one.num_cached_tokens for one in prompts)
    return f": prompt processed={processed} total={total} cached={cached}\n\n".encode()


class OutputStream:
    """The outputs of turns that the engine has taken.

    `aclose` aborts what is still running; it is safe to call at any time, also before the first read.
    """

    def __init__(
        self,
        first: asyncio.Future[tuple[int, RequestOutput]],
        rest: Outputs,
        answers: list[Collected],
        reserved: Reserved,
        quiet_s: float,
        progress: Callable[[], Sequence[PromptProgress]],
    ) -> None:
        """`reserved` is returned at the end. `progress`: of all prompts that haven't ended."""
        self.quiet_s = quiet_s
        """Seconds of silence after which `waiting` is sent; 0: never."""
        self.tell_progress: Waiting = as_comment
        self._progress = progress
        self.answers = answers
        """All that was said so far, a prompt each."""
        self._first = first
        self._is_first_read = False
        self._reserved = reserved
        self._rest = rest

    def tell_as_events(self, chunk: Mapping[str, Any]) -> None:
        """Say how far the prompt has come in events of `chunk` with llama.cpp's ``prompt_progress``."""
        began = time.monotonic()

        def told(prompts: Sequence[PromptProgress]) -> bytes:
            progress = {
                "total": sum(one.num_prompt_tokens for one in prompts),
                "cache": sum(one.num_cached_tokens for one in prompts),
                "processed": sum(one.num_processed_tokens for one in prompts),
                "time_ms": round(1000 * (time.monotonic() - began)),
            }
            return event({**chunk, "prompt_progress": progress})

        self.quiet_s, self.tell_progress = PROGRESS_EVERY_S, told

    def waiting(self) -> bytes:
        """Return what is sent where nothing else was for a while."""
        if self.has_begun:
            return b":\n\n"
        return self.tell_progress(self._progress())

    @property
    def has_begun(self) -> bool:
        """Whether the first output is there, and with it what was reused."""
        return self._first.done()

    def __aiter__(self) -> OutputStream:
        return self

    def __anext__(self) -> Awaitable[tuple[int, RequestOutput]]:
        if self._is_first_read:
            return anext(self._rest)
        self._is_first_read = True
        return self._first

    async def aclose(self) -> None:
        """Abort what is still running."""
        try:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
            await self._rest.aclose()
        finally:
            give_back(self._reserved, self.answers)


def give_back(reserved: Reserved, answers: Sequence[Collected]) -> None:
    """Return what wasn't used; what was computed counts, told or not."""
    reserved.num_generated = sum(one.num_generated_tokens + one.num_held_tokens for one in answers)
    reserved.close()


def stream_header(outputs: OutputStream) -> dict[str, str]:
    """Return the header that says what was reused, for shapes without a place for it.

    None if that isn't known yet.
    """
    return cached_header(outputs.answers[0].cache) if outputs.has_begun else {}
