"""The sampler of two launches in Triton's interpreter: the tokens of the CPU's, whatever stands beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests.engine.sampling.draws import FILTERS, V, logits_of

from stemma.engine.budget.warm_up import warm_up
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampler
from stemma.engine.sampling.state import SamplingState
from stemma.engine.sampling.thinking import ThinkingMarks, ThinkingTokens
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.cuda.sampler import choose
from stemma.model.opened.abilities import Abilities

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams(temperature=0.0)
GRAMMAR = GrammarSpec("regex", "a")
SPELLED = {token: bytes([97 + token % 26]) for token in range(V)}
THINKING = ThinkingTokens(ThinkingMarks(b"!", b"?", is_open=True), ((7,), (7,)), SPELLED)


def state_of(params: SamplingParams, vocab_size: int = V, index: int = 0, **settings: Any) -> SamplingState:
    ending = EndingRule.of(params, (1,), vocab_size)
    state = SamplingState(params, [0, 5, 5, 7], vocab_size, index=index, ending=ending, **settings)
    state.extend([7, 9, 9, 11])
    return state


def both(logits: torch.Tensor, states: Sequence[SamplingState], drafts: Any = None) -> list[int]:
    """Return the kernels' tokens, which are those of torch's operations."""
    expected = Sampler().sample(logits, states, drafts)
    drawn = Sampler(choose).sample(logits.to(DEVICE), states, drafts)
    assert drawn == expected
    return drawn.token_ids


@pytest.mark.one_in(3)
@pytest.mark.parametrize("vocab_size", [V, 700, pytest.param(9_001, marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", [GREEDY, *FILTERS], ids=str)
def test_tokens_are_those_of_the_cpu(params: SamplingParams, vocab_size: int) -> None:
    states = [state_of(replace(params, seed=3), vocab_size, index) for index in range(3)]
    both(torch.stack([logits_of(seed, vocab_size) for seed in range(3)]), states)


EXTREMES = {
    "top_k": SamplingParams(top_k=10**12),
    "cold": SamplingParams(temperature=1e-30),
    "coldest": SamplingParams(temperature=1e-300),
    "hot": SamplingParams(temperature=1e30),
    "narrow": SamplingParams(top_p=1e-300),
    "min_p": SamplingParams(min_p=1.0),
}


@pytest.mark.parametrize("rule", EXTREMES)
def test_the_largest_and_smallest_settings_are_taken(rule: str) -> None:
    states = [state_of(replace(EXTREMES[rule], seed=3), index=index) for index in range(3)]
    both(torch.stack([logits_of(seed) for seed in range(3)]), states)


RULES = {
    "bias": SamplingParams(logit_bias=((3, 9.0), (4, -100.0), (1, 5.0)), min_tokens=9),
    "only": SamplingParams(allowed_token_ids=(2, 33, 38), repetition_penalty=1.5),
    "bad words": SamplingParams(bad_words=((12,), (11, 20), (10, 21))),
    "none left": SamplingParams(allowed_token_ids=(3, 4), logit_bias=((3, -np.inf), (4, -np.inf))),
    "budget": SamplingParams(max_thinking_tokens=0, thinking=THINKING, logit_bias=((7, -np.inf),)),
    "logprobs": SamplingParams(logprobs=3, top_k=5),
}


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_bits_and_additions(rule: str, temperature: float) -> None:
    params = replace(RULES[rule], temperature=temperature, seed=5)
    both(torch.stack([logits_of(seed) for seed in range(4)]), [state_of(params, index=i) for i in range(4)])


class Bits:
    """A grammar that allows some tokens wherever it is."""

    def __init__(self, allowed: Sequence[int], vocab_size: int) -> None:
        self._mask = np.zeros(vocab_size, dtype=np.bool_)
        self._mask[list(allowed)] = True

    def packed(self, _ahead: Sequence[int] = ()) -> Any:
        return np.packbits(np.pad(self._mask, (0, -len(self._mask) % 32)), bitorder="little")

    def allowed(self, _ahead: Sequence[int] = ()) -> Any:
        return self._mask

    def most_likely(self, logits: Any, _ahead: Sequence[int], likeliest: int) -> int:
        return int(np.where(self._mask, logits, -np.inf).argmax()) if self._mask.any() else likeliest

    def append(self, _token: int) -> bool:
        return True


@pytest.mark.parametrize("allowed", [(), (31, 32), (39,), tuple(range(300, 700))])
def test_a_grammars_mask_is_read_as_bits(allowed: tuple[int, ...]) -> None:
    """One that allows nothing is no rule."""
    grammar: Any = Bits(allowed, 700)
    params = SamplingParams(grammar=GRAMMAR, seed=1, top_p=0.9)
    states = [
        state_of(one, 700, index, grammar=grammar)
        for index, one in enumerate((params, replace(params, temperature=0.0), params))
    ]
    drawn = both(torch.stack([logits_of(seed, 700) for seed in range(3)]), states)
    assert not allowed or set(drawn) <= set(allowed)


def test_no_batch_changes_a_row() -> None:
    """Beside rows of all kinds, in any order, drafted behind its output, or alone."""
    params = [replace(one, seed=9) for one in (*FILTERS[::3], *RULES.values(), GREEDY)]
    logits = torch.stack([logits_of(seed, V) for seed in range(len(params))]).to(DEVICE)
    together = Sampler(choose).sample(logits, [state_of(one) for one in params])
    order = list(range(len(params)))[::-1]
    turned = Sampler(choose).sample(logits[order], [state_of(params[i]) for i in order])
    assert turned.token_ids[::-1] == together.token_ids
    for i in (1, 2, 4):
        alone = Sampler(choose).sample(logits[i : i + 1], [state_of(params[i])])
        assert alone.token_ids == [together.token_ids[i]]


def test_drafts_count_as_output() -> None:
    params = SamplingParams(seed=4, frequency_penalty=1.5, min_tokens=6, bad_words=((5, 6, 8),))
    logits = torch.stack([logits_of(seed) for seed in range(4)])
    both(logits, [state_of(params), state_of(GREEDY)], [[5, 6], []])


@settings(max_examples=8, deadline=None)
@given(
    values=st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=20, max_size=20),
    uniform=st.sampled_from([0.0, 0.25, 0.999999, 1 - 2**-53]),
    top_k=st.sampled_from([0, 1, 3, 19]),
    top_p=st.sampled_from([0.3, 0.99, 1.0]),
)
def test_equal_logits_stay_together(values: list[float], uniform: float, top_k: int, top_p: float) -> None:
    """At thresholds; and no token of weight zero is drawn, however high the random number is."""
    logits = torch.tensor([[*values, 0.75]])
    state = state_of(SamplingParams(top_k=top_k, top_p=top_p), 21)
    state.uniform = lambda _position: uniform  # type: ignore[assignment, method-assign]
    [token] = both(logits, [state])
    assert logits[0, token] > float("-inf")


@pytest.mark.slow
def test_hundreds_of_draws_are_equal() -> None:
    params = SamplingParams(seed=2, top_p=0.95, temperature=0.8)
    states = [state_of(params, 1000, index) for index in range(500)]
    both(torch.stack([logits_of(seed, 1000) for seed in range(500)]), states)


def test_warm_up_draws_too() -> None:
    """So that no client waits for what is compiled."""
    drawn: list[torch.Tensor] = []
    kv = DeviceKV(KVLayout(1, 2, 16, 1, 8, "float32"), 4)
    model: Any = SimpleNamespace(
        decoder=None,
        abilities=Abilities(),
        max_model_len=64,
        forward=lambda batch, _kv: torch.zeros(len(batch.logits_rows), V),
        choose=lambda logits, rules: drawn.append(choose(logits, rules)),
    )
    asked: Any = SimpleNamespace(scheduler=SimpleNamespace(max_batch_tokens=16, max_num_seqs=2))
    warm_up(model, kv, asked, None)
    assert {len(tokens) for tokens in drawn} == {1, 2}
    assert all(not tokens.any() for tokens in drawn)
