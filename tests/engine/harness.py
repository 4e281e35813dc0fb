"""Drives an `Engine` step by step and collects what clients would see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.engine.core.engine import Engine
from stemma.engine.core.runner import PreparedStep, Runner
from stemma.engine.core.step_rows import StepRows
from stemma.engine.output.output import OutputProcessor
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.memory.tiers.transfer import TierTransfer
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace
from stemma.types import NO_RETENTION, FinishReason, Retention, as_tokens

MAX_STEPS = 20_000


@dataclass
class Answer:
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    stop_reason: dict[int, str | int | None] = field(default_factory=dict)
    cache: CacheReport | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    finished: bool = False


class CountingRunner(Runner):
    """Counts the tokens that each step computes; fails and delays steps when a test says so."""

    def __init__(self, runner: Runner) -> None:
        vars(self).update(vars(runner))  # the same model, blocks and buffers
        self.plans: list[list[tuple[str, int, int]]] = []
        self.fail_next = False
        self.failing_run: int | None = None
        """Number, from 1, of the step launched ahead that fails on the device."""
        self.num_runs = 0
        self.device_delay_s = 0.0
        self.num_ahead = 0
        """Steps that were launched ahead."""

    def forward(self, rows: StepRows) -> torch.Tensor:
        self._note(rows)
        return super().forward(rows)

    def prepare(self, rows: StepRows) -> PreparedStep:
        self._note(rows)
        self.num_ahead += 1
        return super().prepare(rows)

    def run(self, step: PreparedStep, drawn: torch.Tensor | None) -> torch.Tensor:
        time.sleep(self.device_delay_s)
        self.num_runs += 1
        if self.num_runs == self.failing_run:
            raise RuntimeError("the device is on fire")
        return super().run(step, drawn)

    def _note(self, rows: StepRows) -> None:
        rows.check()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        self.plans.append([(i.sequence.state.request.request_id, i.start, i.num_tokens) for i in rows.items])

    @property
    def num_computed(self) -> int:
        return sum(n for plan in self.plans for _, _, n in plan)


class Harness:
    def __init__(
        self,
        engine: Engine,
        processor: OutputProcessor,
        key_space: KeySpace,
        tiers: TierTransfer | None = None,
    ) -> None:
        self.engine = engine
        self.key_space = key_space
        self.tiers = tiers
        self.cache = engine.cache
        self.processor = processor
        self.answers: dict[str, Answer] = {}
        self.runner = CountingRunner(engine.runner)
        engine.runner = self.runner
        self._numbers = count()

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        retention: Retention = NO_RETENTION,
        session: str = "",
    ) -> str:
        request_id = request_id or f"r{next(self._numbers)}"
        params = params or greedy(4)
        asked = GenerationRequest(
            request_id, as_tokens(prompt), params, namespace, retention=retention, session=session
        )
        self.engine.add(self.engine.checked(asked))
        self.answers[request_id] = Answer()
        return request_id

    def step(self) -> None:
        self._take(self.engine.step())

    def abort(self, request_id: str) -> None:
        self._take(self.engine.abort(request_id))

    def fail_all(self, message: str) -> None:
        self._take(self.engine.fail_all(message))

    def run(self, *, check: bool = False) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                self.engine.check()
                return
            self.step()
            if check:
                self.engine.check()
        raise AssertionError("the engine doesn't come to an end")

    def serve(self, prompt: Sequence[int] | np.ndarray, params: SamplingParams | None = None) -> Answer:
        request_id = self.add(prompt, params)
        self.run()
        return self.answers[request_id]

    def _take(self, news) -> None:
        outputs, stopped = self.processor.process(news)
        for one in stopped:
            self.engine.stop_sequence(one.request_id, one.index)
        for output in outputs:
            answer = self.answers[output.request_id]
            answer.cache, answer.finished = output.cache, output.finished
            answer.prompt_logprobs = output.prompt_logprobs
            answer.error = answer.error or output.error
            for delta in output.deltas:
                i = delta.index
                answer.token_ids.setdefault(i, []).extend(delta.token_ids)
                answer.text[i] = answer.text.get(i, "") + delta.text
                if delta.finish_reason is not None:
                    assert i not in answer.finish, "a sequence ended twice"
                    answer.finish[i] = delta.finish_reason
                    answer.stop_reason[i] = delta.stop_reason


def greedy(num_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True} | options)


def prompt(seed: int, num_tokens: int) -> np.ndarray:
    """Return random token ids below the tiny vocabulary."""
    return np.random.default_rng(seed).integers(3, 500, num_tokens).astype(np.int32)
