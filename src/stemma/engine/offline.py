"""Requests of one caller, run to their end without a server: fed as fast as the engine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stemma.engine.api import CacheReport, RequestOutput
from stemma.engine.core.engine import Engine
from stemma.engine.core.validation import CheckedRequest
from stemma.engine.output.output import OutputProcessor
from stemma.engine.pooling import Vector
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.engine.supervisor import EngineSupervisor
from stemma.errors import EngineFailed, Overloaded
from stemma.types import FinishReason, TokenArray


@dataclass(slots=True)
class Completion:
    """One answer to a prompt, of `n`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Empty unless `SamplingParams.logprobs` is set; a beam search has them always."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    """Score of a beam search: log-probability / length ** length_penalty."""


@dataclass(slots=True)
class Generation:
    """A prompt, its answers, and what was reused."""

    prompt_token_ids: TokenArray
    completions: list[Completion]
    cache: CacheReport
    prompt_logprobs: PromptLogprobs | None = None
    """None unless `SamplingParams.prompt_logprobs` is set."""
    pooled: Vector | None = None
    """The vector that `embed` and `score` are made of; None for prompts that are answered."""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text


class OfflineRun:
    """Runs requests in the order in which they are given. For the engine's step thread alone."""

    def __init__(
        self,
        engine: Engine,
        processor: OutputProcessor,
        supervisor: EngineSupervisor,
        requests: Iterator[CheckedRequest],
    ) -> None:
        """`requests` are taken as the engine has room for them; ids are unique."""
        self._engine = engine
        self._processor = processor
        self._supervisor = supervisor
        self._requests = requests
        self._next = next(requests, None)
        self._open: dict[str, Generation] = {}

    def step(self) -> list[tuple[str, Generation]]:
        """Run a step; return the requests that ended in it, by id.

        Raises EngineFailed, and StemmaError if the step failed or ended a request by an error.
        """
        if (failure := self._supervisor.failure) is not None:
            raise EngineFailed(f"the engine stopped: {failure.reason}")
        self._feed()
        outputs, stopped = self._processor.process(self._engine.step())
        for one in stopped:
            self._engine.stop_sequence(one.request_id, one.index)
        ended = []
        for output in outputs:
            _merge(self._open[output.request_id], output)
            if output.finished:
                ended.append((output.request_id, self._open.pop(output.request_id)))
        return ended

    @property
    def has_work(self) -> bool:
        """Whether any request hasn't ended."""
        return bool(self._open) or self._next is not None

    def close(self) -> None:
        """Abort what hasn't ended."""
        for request_id in self._open:
            self._processor.process(self._engine.abort(request_id))
        self._open.clear()
        self._next = None

    def _feed(self) -> None:
        """Queue as many requests as the engine takes."""
        while (one := self._next) is not None:
            try:
                self._engine.add(one)
            except Overloaded:
                return
            self._open[one.request_id] = Generation(
                one.vocabulary_ids,
                [Completion(k) for k in range(one.params.n)],
                CacheReport(len(one.prompt_token_ids)),
            )
            self._next = next(self._requests, None)


def _merge(result: Generation, output: RequestOutput) -> None:
    output.raise_error()
    result.cache = output.cache
    result.prompt_logprobs = output.prompt_logprobs
    result.pooled = output.pooled
    for delta in output.deltas:
        completion = result.completions[delta.index]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        completion.logprobs.extend(delta.logprobs or ())
        completion.finish_reason = delta.finish_reason or completion.finish_reason
        completion.stop_reason = delta.stop_reason if delta.finish_reason else completion.stop_reason
