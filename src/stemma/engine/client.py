"""The contract of an engine seen from an event loop: what the server's planes call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from stemma.budgets import Budget
from stemma.config.settings import PoolSettings
from stemma.engine.adapters import AdapterRegistry
from stemma.engine.api import (
    EngineLoad,
    EngineStats,
    GenerationRequest,
    Prepared,
    PromptProgress,
    RequestOutput,
)
from stemma.engine.operator.cache_control import CacheControl
from stemma.engine.operator.pool_attachment import PoolAttachment
from stemma.model.opened.abilities import Abilities
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.reading import ImageReader
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.keys import KeySpace, Namespace
from stemma.supervision import Supervisor
from stemma.types import TokenArray


class EngineClient(Protocol):
    """An engine seen from the event loop; `engine/async_engine.py` implements it over a thread."""

    model_name: str
    also_named: tuple[str, ...]
    """Other names that requests may use for the model."""
    max_model_len: int
    tokenizer: Tokenizer
    adapters: AdapterRegistry
    """Adapters (LoRA) by the name that requests select them with."""
    cache_control: CacheControl
    """The operator's commands to the cache."""
    eos_token_ids: frozenset[int]
    """Ids that end an answer."""
    default_sampling: Mapping[str, float | int]
    """Fields of `SamplingParams` that the checkpoint's `generation_config.json` sets."""
    images: ImageReader | None
    """Reads images for prompts; None: the model reads text alone."""
    abilities: Abilities
    """Results that the model gives beside text, or instead."""
    pool: PoolAttachment | None
    """None: the prefix cache is off."""
    own_directory: Path | None
    """Directory of the disk tier, where this server alone may write what is to outlive it; None: nowhere."""
    key_space: KeySpace
    """What its KV depends on beside tokens: two servers with equal ones give equal KV."""
    supervisor: Supervisor
    """Learns of errors in the threads that the server starts; one of them stops the engine."""

    @property
    def failure(self) -> str | None:
        """Why the engine stopped serving, if one of its threads failed; None while it serves."""

    @property
    def load(self) -> EngineLoad:
        """How busy it is now; never waits for a step."""

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Bounds of what requests may make the engine hold beside its queue."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and yield its outputs; closing the iterator early aborts the request.

        Raises InvalidRequest, PromptTooLong, Overloaded, ShuttingDown or EngineFailed before the first
        output, and EngineFailed at any time.
        """

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """Queue requests for the same step and return the last output of each, in their order.

        Raises what `generate` does, or the first error that ends one of them. That aborts the others, and so
        does being cancelled.
        """

    async def prepare(self, request: GenerationRequest, max_tokens: int) -> Prepared:
        """Compute up to `max_tokens` of what isn't cached of a prompt, and return how far that came.

        Only while nothing else runs or waits: it ends as soon as a request comes, and so does it if this is
        cancelled. What was computed stays. Raises InvalidRequest, PromptTooLong, ShuttingDown or
        EngineFailed.
        """

    async def abort(self, request_id: str) -> None:
        """End a request with finish reason ABORT; unknown ids are ignored."""

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        """Tell the cache, before a later step, who goes on after an answer.

        `tokens`: its prompt, then itself.
        """

    def num_held_tokens(self, request_id: str) -> int:
        """Return how many computed tokens of a request are held, to be told with those of further steps."""

    def progress(self, request_id: str) -> PromptProgress | None:
        """Return how far the prompt of a request has come that `generate` has queued; None: it hasn't yet."""

    async def stats(self) -> EngineStats:
        """Return a consistent snapshot, taken between two steps."""

    async def draw_tree(self, max_tokens: int = 24) -> str:
        """Return the prefix index as an indented drawing, edges shown as text of up to `max_tokens`."""

    async def attach_pool(self, settings: PoolSettings) -> None:
        """Use a pool from the next step on. Raises ConfigError or StorageError; then nothing has changed."""

    async def detach_pool(self) -> bool:
        """Write what is queued for the pool and detach it; return whether there was one."""

    async def pause(self) -> None:
        """Run no step any more once this returns, until `resume`; requests queue and keep their blocks."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let running ones finish; abort the rest after `timeout_s`.

        Return whether all finished by themselves.
        """

    def close(self) -> None:
        """Stop the step loop; open requests end with ABORT. A second call does nothing."""
