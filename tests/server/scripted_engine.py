"""An `EngineClient` that follows a script: fast and deterministic, for tests of the HTTP planes.

It answers a prompt with text made from the prompt's hash, one token an output, and reports as cached the
longest prefix that an earlier prompt of the same namespace shared.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from stemma.budgets import Budget
from stemma.config.settings import LoraSettings, PoolSettings
from stemma.engine.adapters import AdapterRegistry
from stemma.engine.api import (
    CacheReport,
    DraftCount,
    EngineLoad,
    EngineStats,
    GenerationRequest,
    Prepared,
    PromptProgress,
    RequestOutput,
    SequenceDelta,
)
from stemma.engine.client import EngineClient
from stemma.engine.operator.cache_control import CacheControl
from stemma.engine.operator.pool_attachment import PoolAttachment
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.errors import ConfigError, InvalidRequest, Overloaded, PromptTooLong, ShuttingDown
from stemma.model.lora.adapter import LinearShape
from stemma.model.opened.abilities import Abilities
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.reading import ImageReader
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.keys import KeySpace, Namespace
from stemma.supervision import LoggingSupervisor, Supervisor
from stemma.types import FinishReason, Tier, TokenArray

IDLE = EngineLoad(num_seats=4)
WORDS = ("the", "branch", "holds", "every", "leaf", "and", "naïve", "roots", "grow", "日本", "slowly", ".")


@dataclass
class Script:
    """What the engine does next."""

    delay_s: float = 0.0
    """Before each token."""
    gate: threading.Event | None = None
    """No token comes before it is set."""
    joined: int = 1
    """Deliver so many steps together, but for the first and the last."""
    miss_reason: str = "cold"
    overloaded: bool = False
    fail_after: int | None = None
    """Report an error after so many tokens."""
    capacity_tokens: int = 10**9
    """Longer prompts can never be held."""
    draining: bool = False
    reply: str | None = None
    """What every sequence says, to its end; None: words made from the prompt."""
    spelled: bool = False
    """Write `reply` one character a token, as no tokenizer with merges does."""


@dataclass
class ScriptedEngine(EngineClient):
    tokenizer: Tokenizer
    model_name: str = "scripted"
    also_named: tuple[str, ...] = ()
    max_model_len: int = 4096
    eos_token_ids: frozenset[int] = frozenset()
    budgets: tuple[Budget, ...] = ()
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    pool: PoolAttachment | None = None
    cache_control: CacheControl = field(init=False)
    """Unset: a test that asks for it sets one."""
    adapters: AdapterRegistry = field(
        default_factory=lambda: AdapterRegistry(
            {"model.layers.0.self_attn.q_proj": LinearShape(8, 16)}, LoraSettings(), ["scripted"]
        )
    )
    own_directory: Path | None = None
    supervisor: Supervisor = LoggingSupervisor()  # noqa: RUF009 - it holds nothing
    images: ImageReader | None = None
    abilities: Abilities = field(default_factory=Abilities)
    failure: str | None = None
    load: EngineLoad = IDLE
    key_space: KeySpace = field(default_factory=lambda: KeySpace("scripted", "none", 16))
    script: Script = field(default_factory=Script)
    aborted: list[str] = field(default_factory=list)
    concluded: list[tuple[Namespace, list[int], Conclusion]] = field(default_factory=list)
    active: set[str] = field(default_factory=set)
    requests: list[GenerationRequest] = field(default_factory=list)
    prepared: list[GenerationRequest] = field(default_factory=list)
    closed: bool = False
    paused: bool = False
    cut_off: bool = False
    held: dict[str, int] = field(default_factory=dict)
    """Tokens by request that no output tells yet, as `AsyncEngine` holds them; under "" of all others."""

    def reply_ids(self, request: GenerationRequest, index: int) -> list[int]:
        """The token ids that sequence `index` will get."""
        limit = request.params.max_tokens
        if self.script.reply is not None and self.script.spelled:
            pieces = [self.tokenizer.encode(char, add_special_tokens=False) for char in self.script.reply]
            return np.concatenate(pieces)[:limit].tolist()
        if self.script.reply is not None:
            return self.tokenizer.encode(self.script.reply, add_special_tokens=False)[:limit].tolist()
        seed = zlib.crc32(request.prompt_token_ids.tobytes()) + index
        words = [WORDS[(seed + step * 7) % len(WORDS)] for step in range(limit or 12)]
        return self.tokenizer.encode(" ".join(words), add_special_tokens=False)[:limit].tolist()

    def _cached(self, request: GenerationRequest) -> int:
        best = 0
        for earlier in self.requests:
            if earlier.namespace == request.namespace:
                best = max(best, _shared(earlier.prompt_token_ids, request.prompt_token_ids))
        return min(best, len(request.prompt_token_ids) - 1)

    def num_held_tokens(self, request_id: str) -> int:
        return self.held.get(request_id, self.held.get("", 0))

    def progress(self, request_id: str) -> PromptProgress | None:
        found = next((one for one in self.requests if one.request_id == request_id), None)
        return None if found is None else PromptProgress(len(found.prompt_token_ids))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.script.draining:
            raise ShuttingDown("the engine drains")
        if self.script.overloaded:
            raise Overloaded("the queue is full", retry_after_s=2.5)
        if len(request.prompt_token_ids) > self.script.capacity_tokens:
            raise PromptTooLong("the prompt is longer than the whole KV cache", param="prompt")
        if int(request.prompt_token_ids.max()) >= self.tokenizer.vocab_size:
            raise InvalidRequest("token id out of the vocabulary", param="prompt")
        num_prompt = len(request.prompt_token_ids)
        cached = self._cached(request)
        report = CacheReport(
            num_prompt, {Tier.DEVICE: cached} if cached else {}, self.script.miss_reason, "never seen before"
        )
        self.requests.append(request)
        self.active.add(request.request_id)
        try:
            outputs = self._outputs(request, report)
            async for output in joined(outputs, self.script.joined, request.shows_steps):
                yield output
        finally:
            self.active.discard(request.request_id)

    async def prepare(self, request: GenerationRequest, max_tokens: int) -> Prepared:
        self.prepared.append(request)
        return Prepared(len(request.prompt_token_ids), len(request.prompt_token_ids))

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        return [[output async for output in self.generate(one)][-1] for one in requests]

    async def _outputs(
        self, request: GenerationRequest, report: CacheReport
    ) -> AsyncGenerator[RequestOutput, None]:
        params = request.params
        replies = [self.reply_ids(request, index) for index in range(params.n)]
        sent = [""] * params.n
        num_generated = 0
        if request.pooling is not None:
            assert self.abilities.embedding is not None
            vector = np.linspace(0.1, 1.0, self.abilities.embedding.size, dtype=np.float32)
            yield RequestOutput(request.request_id, (), report, True, 0, pooled=vector)
            return
        if params.max_tokens == 0:
            ends = tuple(SequenceDelta(i, (), "", None, FinishReason.LENGTH) for i in range(params.n))
            scores = scripted_scores(request)
            yield RequestOutput(request.request_id, ends, report, True, 0, prompt_logprobs=scores)
            return
        for step in range(max(map(len, replies))):
            await asyncio.sleep(self.script.delay_s)
            while self.script.gate is not None and not self.script.gate.is_set():
                await asyncio.sleep(0.01)
            if self.cut_off:
                ends = tuple(SequenceDelta(i, (), "", None, FinishReason.ABORT) for i in range(params.n))
                yield RequestOutput(request.request_id, ends, report, True, num_generated)
                return
            if self.script.fail_after is not None and step >= self.script.fail_after:
                yield RequestOutput(request.request_id, (), report, True, num_generated, error="step failed")
                return
            deltas = []
            for index, ids in enumerate(replies):
                if step >= len(ids):
                    continue
                num_generated += 1
                whole = self.tokenizer.decode(ids[: step + 1])
                last = step == len(ids) - 1
                text = whole[len(sent[index]) :] if last or not whole.endswith("\ufffd") else ""
                sent[index] += text
                logprobs = None
                if params.logprobs is not None:
                    top = tuple((ids[step] + rank, -0.5 - rank) for rank in range(params.logprobs))
                    logprobs = (TokenLogprob(ids[step], -0.5, top),)
                end = FinishReason.STOP if self.script.reply is not None else FinishReason.LENGTH
                finish = end if last else None
                deltas.append(SequenceDelta(index, (ids[step],), text, logprobs, finish))
            done = step == max(map(len, replies)) - 1
            yield RequestOutput(
                request.request_id,
                tuple(deltas),
                report,
                done,
                num_generated,
                0.25,
                prompt_logprobs=scripted_scores(request),
            )

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        self.concluded.append((namespace, tokens.tolist(), conclusion))

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> EngineStats:
        cached = sum(self._cached(request) for request in self.requests[:1])
        return EngineStats(
            num_running=len(self.active),
            num_waiting=0,
            num_preemptions=1,
            num_prompt_tokens=100,
            num_generated_tokens=50,
            cached_tokens_by_tier={Tier.DEVICE: 40 + cached},
            num_blocks=16,
            num_free_blocks=6,
            num_cached_blocks=10,
            num_evicted_blocks=3,
            misses_by_reason={"cold": 2},
            drafts_by_source={"mtp": DraftCount(9, 7)},
        )

    async def draw_tree(self, max_tokens: int = 24) -> str:
        return f"root\n└─ edge of up to {max_tokens} tokens"

    async def attach_pool(self, settings: PoolSettings) -> None:
        raise ConfigError("a scripted engine takes no pool")

    async def detach_pool(self) -> bool:
        return False

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def drain(self, timeout_s: float) -> bool:
        self.script.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self.cut_off = bool(self.active)
        return not self.cut_off

    def close(self) -> None:
        self.closed = True


async def joined(
    outputs: AsyncIterator[RequestOutput], size: int, shows_steps: bool
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs, several as one, as an engine does that holds tokens for a moment."""
    held: list[RequestOutput] = []
    is_first = True
    async for output in outputs:
        if output.error and held:
            yield replace(held[-1], deltas=_deltas(held, shows_steps))
            held.clear()
        held.append(output)
        if is_first or output.finished or output.error or len(held) == size:
            yield replace(output, deltas=_deltas(held, shows_steps))
            held.clear()
        is_first = False


def _deltas(outputs: Sequence[RequestOutput], shows_steps: bool) -> tuple[SequenceDelta, ...]:
    deltas = [delta for output in outputs for delta in output.deltas]
    if shows_steps:
        return tuple(deltas)
    found: dict[int, SequenceDelta] = {}
    for new in deltas:
        old = found.get(new.index, SequenceDelta(new.index, (), ""))
        found[new.index] = replace(
            new,
            token_ids=old.token_ids + new.token_ids,
            text=old.text + new.text,
            logprobs=None if new.logprobs is None else (old.logprobs or ()) + new.logprobs,
        )
    return tuple(found.values())


def scripted_scores(request: GenerationRequest) -> PromptLogprobs | None:
    """Token i has log-probability -i / 10, and rank 2 behind its id + 1 and + 2."""
    if (num_top := request.params.prompt_logprobs) is None:
        return None
    tokens = request.prompt_token_ids
    places = np.arange(1, len(tokens))
    offsets = np.arange(1, num_top + 1)
    return PromptLogprobs(
        tokens,
        (-places / 10).astype(np.float32),
        np.full(len(places), 2, dtype=np.int32),
        (tokens[1:, None] + offsets).astype(np.int32),
        np.broadcast_to(-offsets.astype(np.float32), (len(places), num_top)),
    )


def _shared(left: TokenArray, right: TokenArray) -> int:
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
