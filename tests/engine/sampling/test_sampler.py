"""Sampling against a naive numpy reference: exact penalties and filters, chi-square for the draws."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.sampling.chi_square import chi_square_fits
from tests.engine.sampling.draws import FILTERS, V, logits_of

from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.filters import argmax, candidates, draw, keep, weights_of
from stemma.engine.sampling.logprobs import likeliest
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampled, Sampler
from stemma.engine.sampling.state import SamplingState


def reference(
    logits: npt.NDArray[np.float64],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> npt.NDArray[np.float64]:
    """Return the distribution [V] from which the next token must come, written out step by step."""
    x = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        x[[*ends, *params.stop_token_ids]] = -np.inf
    x /= params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0.0
    if params.top_k > 0:
        p[p < np.sort(p)[-min(params.top_k, len(p))]] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        descending = np.sort(p)[::-1]
        sums = np.concatenate([[0.0], descending.cumsum()])
        more_likely = sums[np.searchsorted(-descending, -p, side="left")]
        p[more_likely >= params.top_p] = 0.0
    return p / p.sum()


class GridState(SamplingState):
    """Its random numbers are the midpoints of a grid over [0, 1), one after the other, again and again."""

    def __init__(self, params: SamplingParams, num_draws: int, vocab_size: int, **settings: object) -> None:
        ending = EndingRule.of(params, settings.get("ends", ()), vocab_size)  # type: ignore[arg-type]
        super().__init__(params, settings.get("prompt", ()), vocab_size, ending=ending)  # type: ignore[arg-type]
        self._grid = itertools.cycle((np.arange(num_draws) + 0.5) / num_draws)

    def uniform(self, position: int) -> float:
        return float(next(self._grid))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [V, 3000, 40_001])
def test_a_grid_of_random_numbers_gives_the_reference_distribution(
    params: SamplingParams, vocab_size: int
) -> None:
    """Inverse CDF: with N evenly spread random numbers each token is drawn N p times, give or take one."""
    num_draws = 100 if vocab_size == 40_001 else 2000
    logits = logits_of(1, vocab_size)
    prompt, output, ends = [0, 5, 5, 7], [7, 9, 9, 11], [1, int(logits.argmax())]
    state = GridState(params, num_draws, vocab_size, prompt=prompt, ends=ends)
    for token in output:
        state.append(token)
    drawn = Sampler().sample(logits.expand(num_draws, -1), [state] * num_draws)
    counts = np.bincount(drawn.token_ids, minlength=vocab_size)
    expected = reference(logits.double().numpy(), params, prompt, output, ends) * num_draws
    assert np.abs(counts - expected).max() < 1.01
    assert counts[expected == 0].sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("params", FILTERS[4:10], ids=str)
def test_seeded_draws_fit_by_chi_square(params: SamplingParams) -> None:
    """The random numbers of consecutive positions of one seeded request are independent enough."""
    logits = logits_of(2)
    seeded = SamplingParams(seed=11, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    state = SamplingState(seeded, (), V)
    counts = np.zeros(V, dtype=np.int64)
    for _ in range(2500):
        [token] = Sampler().sample(logits[None], [state]).token_ids
        counts[token] += 1
        state.append(token)
    assert chi_square_fits(counts, reference(logits.double().numpy(), seeded))


def sample_one(state: SamplingState, logits: torch.Tensor, num: int = 1) -> list[int]:
    tokens = []
    for _ in range(num):
        [token] = Sampler().sample(logits[None], [state]).token_ids
        state.append(token)
        tokens.append(token)
    return tokens


def test_penalties_are_exact_and_leave_the_logits_alone() -> None:
    """Greedy choice under penalties is the argmax of the formula; the given tensor stays as it was."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25
    )
    logits = torch.tensor([[3.0, 2.9, 2.4, -1.0]])
    before = logits.clone()
    state = SamplingState(params, [1], 4)
    chosen = sample_one(state, logits[0], 4)
    # 3.0, then 3.0/1.5 - .5 - .25 = 1.25; 2.9/1.5 = 1.93; 2.4; then 2.4/1.5 - .75 = .85; 1.93 - .75 = 1.18
    assert chosen == [0, 2, 1, 0]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_cannot_come_before_min_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=(2,), seed=0)
    state = SamplingState(params, [], 3, ending=EndingRule.of(params, [0], 100))
    logits = torch.tensor([50.0, 0.0, 50.0])
    assert sample_one(state, logits, 3) == [1, 1, 1]
    assert sample_one(state, logits)[0] in (0, 2)


def test_ignored_eos_is_an_ordinary_token_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True)
    assert sample_one(
        SamplingState(params, [], 3, ending=EndingRule.of(params, [0], 100)), torch.tensor([5.0, 0, 0])
    ) == [0]


def test_a_seeded_request_is_the_same_in_any_batch() -> None:
    """Neighbours with other filters, penalties and temperatures don't change a seeded request's tokens."""
    vocab_size = 3000
    logits = torch.stack([logits_of(seed, vocab_size) for seed in range(len(FILTERS))])
    mine = [SamplingParams(seed=7, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p) for p in FILTERS]
    alone = [sample_one(SamplingState(p, [1, 2], vocab_size), logits[i], 70) for i, p in enumerate(mine)]
    together = [SamplingState(p, [1, 2], vocab_size) for p in mine]
    others = [SamplingState(p, [3], vocab_size, ending=EndingRule.of(p, [0], 100)) for p in FILTERS]
    rows = torch.cat([logits, logits * 0.5])
    result: list[list[int]] = [[] for _ in mine]
    for _ in range(70):
        drawn = Sampler().sample(rows, [*together, *others]).token_ids
        for i, state in enumerate([*together, *others]):
            state.append(drawn[i])
            if i < len(mine):
                result[i].append(drawn[i])
    assert result == alone


def test_seeds_and_sequence_indices_differ() -> None:
    logits = torch.zeros(1000)

    def text(seed: int | None, index: int = 0) -> tuple[int, ...]:
        return tuple(sample_one(SamplingState(SamplingParams(seed=seed), [], 1000, index=index), logits, 8))

    assert text(1) == text(1)
    assert text(-1) == text(-1)
    distinct = {text(1), text(2), text(-1), text(1, 1), text(1, 2), text(None), text(None)}
    assert len(distinct) == 7


def test_rows_of_a_draft_are_the_rows_of_later_steps() -> None:
    """Row j with a draft gives the token that would come after the draft's first j tokens were output."""
    params = SamplingParams(
        seed=3, repetition_penalty=1.4, frequency_penalty=0.9, min_tokens=4, stop_token_ids=(6,), top_p=0.9
    )
    logits = torch.stack([logits_of(seed) for seed in range(5)])
    draft = [6, 8, 8, 9]
    state = SamplingState(params, [8, 1], V)
    state.append(1)
    plain = SamplingState(SamplingParams(temperature=0.0), [], V)
    drawn = Sampler().sample(torch.cat([logits, logits[:1]]), [state, plain], [draft, []])
    step_by_step = []
    for row, token in zip(logits, [*draft, 0], strict=True):
        step_by_step += Sampler().sample(row[None], [state]).token_ids
        state.append(token)
    assert drawn.token_ids == [*step_by_step, int(logits[0].argmax())]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    wants = SamplingParams(logprobs=2, temperature=0.3, top_k=3, repetition_penalty=2.0, seed=0)
    states = [SamplingState(p, [0, 1, 2], V) for p in (wants, SamplingParams(), SamplingParams(logprobs=0))]
    sampled: Sampled = Sampler().sample(logits, states)
    expected = torch.log_softmax(logits, dim=-1)
    first, second, third = sampled.logprobs
    assert second is None
    assert first is not None
    assert third is not None
    assert first.logprob == pytest.approx(expected[0, sampled.token_ids[0]].item(), abs=1e-6)
    best = torch.topk(expected[0], 2)
    assert first.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert (third.token_id, third.top) == (sampled.token_ids[2], ())


def test_ties_at_a_threshold_are_all_kept() -> None:
    """An order among equal logits would depend on the sorting algorithm; all of them stay instead."""
    logits = torch.zeros(3000)
    logits[10] = 1.0
    state = GridState(SamplingParams(top_k=2), 6000, 3000)
    drawn = Sampler().sample(logits.expand(6000, -1), [state] * 6000).token_ids
    assert len(set(drawn)) > 2000


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    k=st.integers(1, 8),
    vocab_size=st.integers(2, 9000),
    levels=st.integers(1, 40),
)
def test_candidates_are_the_largest_values(seed: int, k: int, vocab_size: int, levels: int) -> None:
    """Also with many equal values; the ids name where the values are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(levels, (3, vocab_size), generator=generator).float()
    values, ids = candidates(x, k)
    assert torch.equal(values, torch.topk(x, min(k, vocab_size)).values)
    assert torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    vocab_size=st.integers(1, 2000),
    top_k=st.sampled_from([0, 1, 3, 50, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_filters_keep_the_reference_support(
    seed: int, vocab_size: int, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    logits = logits_of(seed, vocab_size, scale)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    weights = weights_of(logits[None])
    keep(weights, [params])
    kept = weights[0, :vocab_size] > 0
    expected = torch.from_numpy(reference(logits.double().numpy(), params) > 0)
    # The sums before a token may differ in the last digit: the boundary may move by tokens of no weight.
    p = reference(logits.double().numpy(), SamplingParams(top_k=top_k, min_p=min_p))
    differing = (kept != expected).numpy()
    assert differing.sum() <= 1
    assert p[differing].sum() < 1e-2
    assert kept[logits.argmax()]


@pytest.mark.parametrize("num_columns", [5, 256])
def test_a_token_of_no_weight_is_never_drawn(num_columns: int) -> None:
    weights = torch.zeros(3, num_columns)
    weights[:, [1, 3]] = 0.5
    uniforms = torch.tensor([0.0, 1.0 - 2**-53, 1.0], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [1, 3, 3]


@pytest.mark.parametrize("vocab_size", [100, 1280])
def test_argmax_takes_the_first_of_equal_values(vocab_size: int) -> None:
    x = torch.randint(9, (50, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    assert argmax(x).tolist() == x.numpy().argmax(axis=1).tolist()


def test_an_empty_batch_gives_nothing() -> None:
    assert Sampler().sample(torch.empty(0, V), []) == Sampled([], [])


def test_ties_beyond_the_candidates_of_one_row_leave_the_others_their_logits() -> None:
    """A row whose candidates don't suffice joins those that are drawn from the whole vocabulary."""
    logits = torch.zeros(3, 3000)
    logits[1, 7] = logits[2, 9] = 100.0
    params = [SamplingParams(seed=1, top_k=top_k) for top_k in (5, 0, 0)]
    drawn = Sampler().sample(logits, [SamplingState(p, [], 3000) for p in params]).token_ids
    assert drawn[1:] == [7, 9]


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_device_does_not_matter(device: str) -> None:
    """float64 sums walk in order of id, so that logits moved elsewhere give the tokens they give here."""
    logits = torch.stack([logits_of(seed, 3000) for seed in range(len(FILTERS))])
    states = [SamplingState(p, [1, 2], 3000, seed_source=lambda: 5) for p in FILTERS]
    one_by_one = [
        Sampler().sample(row[None], [state]).token_ids[0] for row, state in zip(logits, states, strict=True)
    ]
    assert Sampler().sample(logits.to(device), states).token_ids == one_by_one


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_of_equals_have_the_lowest_ids_however_many_are_asked_for(seed: int) -> None:
    logprobs = torch.randint(-9, 0, (4, 300), generator=torch.Generator().manual_seed(seed)).float()
    for num in (0, 1, 7, 40, 300, 400):
        values, ids = likeliest(logprobs, num)
        for row in range(4):
            order = sorted(range(300), key=lambda i: (-float(logprobs[row, i]), i))[:num]
            assert ids[row].tolist() == order
            assert values[row].tolist() == logprobs[row, order].tolist()
