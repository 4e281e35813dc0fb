"""Beam search above the engine: each round asks for one token of every live beam, with its likeliest rivals.

As in vLLM, a round is a set of ordinary requests whose prompts are prompt + beam. All of them are sent at
once, so the scheduler batches them, and the prefix cache holds everything but the last token of each: a round
costs one token a beam. Nothing in the engine knows of beams.

Each beam contributes its 2 x width likeliest next tokens. A token that ends a text makes a finished
hypothesis; the `width` likeliest others stay live. The score is that of transformers: the sum of
log-probabilities under the raw distribution / (generated tokens, EOS included) ** length_penalty. (vLLM
divides by the length of prompt and output, which makes the penalty mean little after a long prompt.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stemma.engine.api import GenerationRequest, RequestOutput, SequenceDelta
from stemma.engine.client import EngineClient
from stemma.engine.output.detokenizer import make_detokenizer
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.params import SamplingParams
from stemma.model.text.tokenizer import Tokenizer
from stemma.types import FinishReason, as_tokens


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One continuation of the prompt."""

    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry a token, the closing EOS or stop token included."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | None = None
    """The stop token id that ended it; None for EOS and for lengths."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens, the closing one included."""
        return tuple(entry.token_id for entry in self.logprobs)

    def score(self, length_penalty: float) -> float:
        """Return the log-probability normalised by length; higher is better."""
        return self.cumulative_logprob / math.pow(len(self.logprobs), length_penalty)

    def text(self, tokenizer: Tokenizer, request: GenerationRequest) -> str:
        """Return the text behind the prompt, without the token that ended it unless the request wants it."""
        token_ids, params = self.token_ids, request.params
        if self.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        detokenizer = make_detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt=request.prompt_token_ids
        )
        return detokenizer.extend(token_ids) + detokenizer.flush()


class BeamSearch:
    """The state of one search: `requests` to ask the engine, `advance` with the answers, until `is_done`."""

    def __init__(
        self, request: GenerationRequest, eos_token_ids: Collection[int], max_model_len: int
    ) -> None:
        assert request.beam is not None
        self._request = request
        self._params = params = request.params
        self._width = request.beam.width
        self._length_penalty = request.beam.length_penalty
        self._ending = EndingRule.of(params, eos_token_ids, max_model_len - len(request.prompt_token_ids))
        self._max_tokens = self._ending.max_tokens
        self._num_rounds = 0
        self._live = [Hypothesis()]
        self._finished: list[Hypothesis] = []

    @property
    def is_done(self) -> bool:
        """Whether another round can't change the result."""
        return self._is_at_limit or not self._live or self._is_decided

    @property
    def _is_at_limit(self) -> bool:
        return self._num_rounds == self._max_tokens

    @property
    def _is_decided(self) -> bool:
        """Whether no continuation of a live beam can beat the finished ones."""
        if len(self._finished) < self._width or not self._live or self._is_at_limit:
            return False
        # Log-probabilities only fall; the length that flatters them most depends on the penalty's sign.
        length = self._max_tokens if self._length_penalty > 0 else self._num_rounds + 1
        best_possible = self._live[0].cumulative_logprob / math.pow(length, self._length_penalty)
        return best_possible <= self._finished[-1].score(self._length_penalty)

    def requests(self) -> list[GenerationRequest]:
        """Return a request of one token for each live beam."""
        num_logprobs = max(2 * self._width, self._params.logprobs or 0)
        step = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=num_logprobs)
        prompt = self._request.prompt_token_ids
        return [
            replace(
                self._request,
                request_id=f"{self._request.request_id}-round{self._num_rounds}-beam{number}",
                prompt_token_ids=np.concatenate([prompt, as_tokens(beam.token_ids)]),
                params=step,
                beam=None,
                is_continuation=self._num_rounds > 0,
            )
            for number, beam in enumerate(self._live)
        ]

    def advance(self, answers: Sequence[TokenLogprob]) -> None:
        """Take the answers to `requests`, in their order: each with the likeliest tokens, best first."""
        candidates: list[tuple[float, Hypothesis, TokenLogprob]] = []
        for beam, answer in zip(self._live, answers, strict=True):
            top = answer.top[: self._params.logprobs or 0]
            for token_id, logprob in answer.top[: 2 * self._width]:
                if not math.isfinite(logprob):
                    continue
                total = beam.cumulative_logprob + logprob
                candidate = (total, beam, TokenLogprob(token_id, logprob, top))
                if self._ending.is_end(token_id):
                    self._finished.append(self._stopped(*candidate))
                else:
                    candidates.append(candidate)
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        self._live = [
            Hypothesis((*beam.logprobs, entry), total) for total, beam, entry in candidates[: self._width]
        ]
        self._finished = self._best(self._finished)
        self._num_rounds += 1

    def result(self) -> list[Hypothesis]:
        """Return the best `params.n` hypotheses, best first; live ones too unless they have lost already."""
        live = self._live if self._num_rounds and not self._is_decided else []
        return self._best([*self._finished, *live])[: self._params.n]

    def _stopped(self, total: float, beam: Hypothesis, entry: TokenLogprob) -> Hypothesis:
        stop_reason = self._ending.stop_reason(entry.token_id)
        return Hypothesis((*beam.logprobs, entry), total, FinishReason.STOP, stop_reason)

    def _best(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        ranked = sorted(hypotheses, key=lambda one: one.score(self._length_penalty), reverse=True)
        return ranked[: self._width]


async def run_beam_search(
    engine: EngineClient, request: GenerationRequest
) -> AsyncGenerator[RequestOutput, None]:
    """Yield one output, the last, with the best `request.params.n` hypotheses; `request.beam` is set.

    Its cache report is that of the first round; generated tokens are those of the hypotheses returned. If an
    operator aborts a round, the best so far end with ABORT. Closing this early aborts what is outstanding.
    Raises what `EngineClient.generate_all` raises.
    """
    search = BeamSearch(request, engine.eos_token_ids, engine.max_model_len)
    first: RequestOutput | None = None
    was_aborted = False
    while not (search.is_done or was_aborted):
        # From one round to the next the event loop has no turn: whoever looks, as a drain does, finds an open
        # request of this search.
        outputs = await engine.generate_all(search.requests())
        first = first or outputs[0]
        answers = [entry for output in outputs for entry in output.deltas[0].logprobs or ()]
        if len(answers) == len(outputs):
            search.advance(answers)
        else:
            was_aborted = True
    assert first is not None
    unfinished = FinishReason.ABORT if was_aborted else FinishReason.LENGTH
    hypotheses = search.result() or [Hypothesis()] * request.params.n
    texts = await asyncio.to_thread(lambda: [h.text(engine.tokenizer, request) for h in hypotheses])
    yield RequestOutput(
        request_id=request.request_id,
        deltas=tuple(
            SequenceDelta(
                index,
                one.token_ids,
                text,
                one.logprobs if request.params.logprobs is not None else None,
                one.finish_reason if one.finish_reason is FinishReason.STOP else unfinished,
                one.stop_reason,
            )
            for index, (one, text) in enumerate(zip(hypotheses, texts, strict=True))
        ),
        cache=first.cache,
        finished=True,
        num_generated_tokens=sum(len(one.logprobs) for one in hypotheses),
        queue_wait_s=first.queue_wait_s,
        load_s=first.load_s,
    )
