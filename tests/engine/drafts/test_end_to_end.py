"""Drafts in the real engine over a real (tiny, fp32) model: the same answers in fewer steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.harness import Harness, greedy, prompt
from tests.engine.sampling.chi_square import chi_square_fits

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.prefix.keys import Namespace
from stemma.types import FinishReason, TokenArray

MODES = ["auto", "prompt_lookup", "tree", "la"]
MakeHarness = Callable[..., Harness]


@dataclass
class Outcome:
    """Everything a client sees of one request."""

    token_ids: dict[int, list[int]]
    text: dict[int, str]
    finish: dict[int, FinishReason]
    stop_reason: dict[int, str | int | None]
    logprobs: list[float] = field(default_factory=list, compare=False)


def serve_all(
    engine: Harness, requests: Sequence[tuple[TokenArray, SamplingParams]], *, at_once: bool
) -> list[Outcome]:
    """Serve requests side by side, or one after the other, checking the blocks after each step."""
    names = []
    for tokens, params in requests:
        names.append(engine.add(tokens, params))
        if not at_once:
            engine.run(check=True)
    engine.run(check=True)
    answers = [engine.answers[name] for name in names]
    return [Outcome(a.token_ids, a.text, a.finish, a.stop_reason) for a in answers]


def repetitive(seed: int, num_tokens: int) -> TokenArray:
    """Return a prompt made of a few phrases."""
    generator = np.random.default_rng(seed)
    phrases = [generator.integers(3, 500, 5) for _ in range(3)]
    chosen = [phrases[i] for i in generator.integers(0, 3, num_tokens // 5 + 1)]
    return np.concatenate(chosen)[:num_tokens].astype(np.int32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mode", "adaptive"), [("auto", True), *((mode, False) for mode in MODES)])
@pytest.mark.parametrize(("num_blocks", "at_once"), [(14, True), (200, True), (200, False)])
def test_greedy_answers_are_the_same(
    harness: MakeHarness, mode: str, adaptive: bool, num_blocks: int, at_once: bool
) -> None:
    """In batches and alone, with room and with preemptions, and for a prompt served before."""
    requests = [
        (repetitive(1, 30), greedy(40)),
        (prompt(2, 25), greedy(30)),
        (repetitive(1, 30), greedy(40)),
        (prompt(2, 25), greedy(12, frequency_penalty=0.8)),
        (prompt(3, 40), greedy(20, repetition_penalty=1.4)),
        (repetitive(4, 33), greedy(25, presence_penalty=1.5)),
    ]
    plain = harness(num_blocks=num_blocks, block_size=8)
    drafted = harness(
        num_blocks=num_blocks,
        block_size=8,
        speculation=mode,
        speculation_adaptive=adaptive,
        max_batch_tokens=48,
    )
    assert serve_all(drafted, requests, at_once=at_once) == serve_all(plain, requests, at_once=at_once)
    if num_blocks == 14 and at_once:
        assert drafted.engine.stats().num_preemptions > 0
    stats = drafted.engine.stats()
    assert stats.num_draft_tokens >= stats.num_accepted_draft_tokens
    if not adaptive and not (mode == "tree" and at_once):
        assert stats.num_accepted_draft_tokens > 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seeds=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    mode=st.sampled_from(MODES),
    num_blocks=st.integers(12, 40),
    temperature=st.sampled_from([0.0, 0.7]),
    stop=st.sampled_from([(), ("e",), (" t", "qu")]),
    min_tokens=st.integers(0, 6),
    num=st.integers(1, 3),
)
def test_any_seeded_request_gives_the_same_answer(
    harness: MakeHarness,
    seeds: list[int],
    mode: str,
    num_blocks: int,
    temperature: float,
    stop: tuple[str, ...],
    min_tokens: int,
    num: int,
) -> None:
    """Stop strings, min_tokens, n, logprobs and end tokens mean the same with drafts."""
    requests = [
        (
            repetitive(seed, 20 + seed),
            SamplingParams(
                max_tokens=24,
                temperature=temperature,
                top_k=5,
                seed=seed,
                stop=stop,
                stop_token_ids=(7 + seed, 40),
                min_tokens=min_tokens,
                n=num,
                logprobs=1,
            ),
        )
        for seed in seeds
    ]
    plain = harness(num_blocks=num_blocks, block_size=8)
    drafted = harness(num_blocks=num_blocks, block_size=8, speculation=mode, speculation_adaptive=False)
    expected = serve_all(plain, requests, at_once=True)
    assert serve_all(drafted, requests, at_once=True) == expected


@pytest.mark.parametrize("mode", ["tree", "auto"])
def test_sampled_answers_keep_their_distribution(harness: MakeHarness, mode: str) -> None:
    """Unseeded, three tokens of top_k 3: 27 answers whose probabilities the model itself tells."""
    top_k, num_answers, tokens = 3, 1200, prompt(9, 12)
    teacher = harness(num_blocks=64, block_size=8)

    def distribution(after: tuple[int, ...]) -> dict[int, float]:
        name = teacher.add(np.concatenate([tokens, after]).astype(np.int32), greedy(1, logprobs=top_k))
        [news] = teacher.engine.step()
        teacher.processor.process([news])
        assert name in teacher.answers
        assert news.logprobs[0] is not None
        weights = {token: math.exp(logprob) for token, logprob in news.logprobs[0].top}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    probability = {
        (a, b, c): p_a * p_b * p_c
        for a, p_a in distribution(()).items()
        for b, p_b in distribution((a,)).items()
        for c, p_c in distribution((a, b)).items()
    }
    engine = harness(num_blocks=400, block_size=8, speculation=mode, speculation_adaptive=False)
    seen: Counter[tuple[int, ...]] = Counter()
    params = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=3, n=40, ignore_eos=True)
    for _ in range(num_answers // params.n):
        seen.update(tuple(answer) for answer in engine.serve(tokens, params).token_ids.values())
    counts = np.array([seen[answer] for answer in probability])
    assert counts.sum() == num_answers
    assert chi_square_fits(counts, np.array(list(probability.values())))
    assert engine.engine.stats().num_accepted_draft_tokens > 100


def test_an_answer_generated_again_takes_few_steps(harness: MakeHarness) -> None:
    engine = harness(num_blocks=64, block_size=8, speculation="tree", speculation_adaptive=False)
    first = engine.serve(prompt(5, 30), greedy(64))
    before = len(engine.runner.plans)
    assert engine.serve(prompt(5, 30), greedy(64)).token_ids == first.token_ids
    # One step for the prompt, then 17 tokens a step; the last token of the first answer has no KV.
    assert len(engine.runner.plans) - before <= 1 + 64 // 17 + 2
    assert engine.engine.stats().num_accepted_draft_tokens >= 58


def test_another_tenant_gets_no_drafts_from_it(harness: MakeHarness) -> None:
    engine = harness(num_blocks=64, block_size=8, speculation="tree", speculation_adaptive=False)
    first = engine.serve(prompt(5, 30), greedy(40))
    proposed = engine.engine.stats().num_draft_tokens
    name = engine.add(prompt(5, 30), greedy(40), namespace=Namespace("other"))
    engine.run()
    assert engine.answers[name].token_ids == first.token_ids
    assert engine.engine.stats().num_draft_tokens == proposed


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("mode", ["off", *MODES])
def test_settings_reach_the_engine(checkpoint: Path, mode: str, index: str) -> None:
    """From the offline API; without a radix tree the other sources remain."""
    llm = LLM(checkpoint, speculation=mode, kv_cache_memory="8MB", index=index)
    token_ids = [
        llm.generate(repetitive(1, 40).tolist(), greedy(40))[0].completions[0].token_ids for _ in range(2)
    ]
    assert token_ids[0] == token_ids[1]
    assert (llm.stats().num_draft_tokens > 0) == (mode != "off")
