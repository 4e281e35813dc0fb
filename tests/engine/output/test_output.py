"""The output side: late tokens of an answered request are dropped, and nothing is kept of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.harness import greedy, prompt

from stemma.engine.api import GenerationRequest
from stemma.engine.core.request import Limits, RequestState, SequenceNews
from stemma.engine.output.output import OutputProcessor, Stopped
from stemma.types import FinishReason


@pytest.fixture
def processor(tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def state(**options) -> RequestState:
    request = GenerationRequest("a", prompt(1, 4), greedy(50, **options))
    return RequestState(request, Limits((), 100).ending(request), arrival=0.0, order=0)


def test_tokens_behind_a_stop_string_are_dropped(processor, tokenizer):
    request = state(stop=("X",))
    x = int(tokenizer.encode("X")[-1])
    outputs, stopped = processor.process([SequenceNews(request, 0, (x,))])
    assert stopped == [Stopped("a", 0)]
    assert outputs[0].finished
    assert processor.process([SequenceNews(request, 0, (x,))]) == ([], [])
    assert processor.process([SequenceNews(request, 0, finish_reason=FinishReason.ABORT)]) == ([], [])
    assert processor.num_open == 0


def test_the_rest_of_a_draft_behind_a_stop_string_is_dropped(processor, tokenizer):
    request = state(stop=("X",))
    x, y = (int(tokenizer.encode(t)[-1]) for t in "XY")
    outputs, _ = processor.process([SequenceNews(request, 0, (y, x, y, y))])
    assert outputs[0].deltas[0].token_ids == (y, x)
    assert outputs[0].deltas[0].text == "Y"
    assert outputs[0].num_generated_tokens == 2


def test_one_output_a_request_and_step(processor):
    request = state(n=2)
    outputs, _ = processor.process([SequenceNews(request, 0, (5,)), SequenceNews(request, 1, (6,))])
    assert [[d.index for d in o.deltas] for o in outputs] == [[0, 1]]
    assert not outputs[0].finished
    done = [SequenceNews(request, i, finish_reason=FinishReason.ABORT) for i in (0, 1)]
    assert processor.process(done[:1])[0][0].finished is False
    assert processor.process(done[1:])[0][0].finished is True
    assert processor.num_open == 0


@pytest.mark.parametrize("stop", [(), ("XX",)])
@pytest.mark.parametrize("is_over", [False, True])
def test_steps_that_are_delivered_together_are_one_delta(tokenizer, stop, is_over):
    tokens = [(5,), (6, 7), (8,)]
    end = FinishReason.LENGTH if is_over else None

    def news(request):
        reasons = (None, None, end)
        return [
            SequenceNews(request, 0, ids, (None,) * len(ids), finish_reason=reason)
            for ids, reason in zip(tokens, reasons, strict=True)
        ]

    (joined,), _ = OutputProcessor(tokenizer).process(news(state(stop=stop)))
    shown = state(stop=stop)
    shown.request = replace(shown.request, shows_steps=True)
    (apart,), _ = OutputProcessor(tokenizer).process(news(shown))

    assert [delta.token_ids for delta in apart.deltas] == tokens
    assert [delta.token_ids for delta in joined.deltas] == [(5, 6, 7, 8)]
    assert joined.deltas[0].text == "".join(delta.text for delta in apart.deltas)
    assert joined.deltas[0].finish_reason == apart.deltas[-1].finish_reason == end
    assert joined.num_generated_tokens == apart.num_generated_tokens == 4
    assert joined.finished == apart.finished == is_over
