"""What every handler shares: the engine, the settings, the metrics, and threads for tokenization."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.server.metrics import ServerMetrics

T = TypeVar("T")

TOKENIZER_THREADS = 2
"""Tokenizers work outside the GIL; two keep a long prompt from delaying a short one."""


class ServerContext:
    """One server's state; lives in ``app.state.context``."""

    def __init__(self, engine: EngineClient, settings: Settings, metrics: ServerMetrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.started_at = int(time.time())
        self.draining = False
        self._token_texts: dict[int, str] = {}
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop; for tokenization, which takes 100s of ms on long prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special ones included; remembered, as log-probabilities need many."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.engine.tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def close(self) -> None:
        """Give the threads back."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def context_of(request: Request) -> ServerContext:
    """Return the context of the app that serves `request`."""
    context: ServerContext = request.app.state.context
    return context


def new_request_id(prefix: str) -> str:
    """Return a fresh id, e.g. ``chatcmpl-4f1c...``."""
    return f"{prefix}-{uuid.uuid4().hex}"
