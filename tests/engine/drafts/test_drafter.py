"""The drafter over a model with known distributions: same tokens, same distribution, fewer steps."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tests.engine.sampling.chi_square import chi_square_fits

from stemma.config.settings import SpeculationSettings
from stemma.engine.api import DraftCount
from stemma.engine.drafts.drafter import Drafter, make_drafter
from stemma.engine.drafts.index_memory import IndexMemory
from stemma.engine.drafts.prompt_lookup import PromptLookup
from stemma.engine.drafts.source import DraftSource, num_accepted
from stemma.engine.drafts.suffix import SuffixCorpus
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampler
from stemma.engine.sampling.state import SamplingState
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import as_tokens

V = 10
LOGITS = torch.randn(V, V, V, generator=torch.Generator().manual_seed(4)) * 2.5


def model(tokens: list[int]) -> torch.Tensor:
    """Logits [V] that depend on the last two tokens."""
    return LOGITS[tokens[-2], tokens[-1]]


@dataclass
class World:
    """A prefix tree and a drafter over it, with a simulated clock: a step takes 1 s, a row `row_s` more."""

    settings: SpeculationSettings
    row_s: float = 0.01
    drafter: Drafter | None = None
    index: RadixIndex = field(default_factory=lambda: RadixIndex(4))
    num_steps: int = 0
    num_rows: int = 0
    num_requests: int = 0
    _num_blocks: int = 0

    def __post_init__(self) -> None:
        self.drafter = make_drafter(self.settings, self.index.continuation)

    @property
    def counts(self) -> list[DraftCount]:
        assert self.drafter is not None
        return list(self.drafter.counts.values())

    @property
    def num_proposed(self) -> int:
        return sum(count.num_proposed for count in self.counts)

    @property
    def num_accepted(self) -> int:
        return sum(count.num_accepted for count in self.counts)

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        num_tokens: int,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        seed_source: int = 0,
    ) -> list[int]:
        """Decode as the engine does, and enter the finished sequence in the tree."""
        self.num_requests += 1
        key, tokens = self.num_requests, list(prompt)
        state = SamplingState(params, prompt, V, seed_source=lambda: seed_source)
        while len(tokens) < len(prompt) + num_tokens:
            draft: tuple[int, ...] = ()
            if self.drafter is not None:
                most = len(prompt) + num_tokens - len(tokens) - 1
                draft = self.drafter.propose(key, namespace, as_tokens(tokens), most)
            rows = [model(tokens + list(draft[:j])) for j in range(len(draft) + 1)]
            drawn = Sampler().sample(torch.stack(rows), [state], [draft]).token_ids
            taken = drawn[: num_accepted(draft, drawn) + 1]
            if self.drafter is not None:
                self.drafter.observe(key, as_tokens(tokens), draft, drawn)
                duration_s = 1.0 + self.row_s * len(rows)
                self.drafter.observe_step(len(rows), len(tokens), len(taken), duration_s)
            self.num_steps += 1
            self.num_rows += len(rows)
            for token in taken:
                state.append(token)
                tokens.append(token)
        if self.drafter is not None:
            self.drafter.finish(key, namespace, as_tokens(tokens), 0)
        num_blocks = -(-len(tokens) // 4)
        blocks = np.arange(self._num_blocks, self._num_blocks + num_blocks, dtype=np.int32)
        self._num_blocks += num_blocks
        self.index.insert(namespace, as_tokens(tokens), blocks, 0.0)
        return tokens[len(prompt) :]


MODES = [
    SpeculationSettings(mode=mode, adaptive=adaptive)
    for mode in ("auto", "prompt_lookup", "tree", "la")
    for adaptive in (True, False)
]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=0.8, top_k=6, seed=5),
    SamplingParams(
        top_p=0.8, presence_penalty=0.6, seed=6, min_tokens=20, max_tokens=60, stop_token_ids=(1, 2)
    ),
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", MODES, ids=lambda s: f"{s.mode}-{'adaptive' if s.adaptive else 'all'}")
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "greedy-penalties", "top_k", "penalties"])
def test_tokens_are_the_same_with_drafts(settings: SpeculationSettings, params: SamplingParams) -> None:
    """Greedy and seeded output, cold and warm, is token for token what it is without drafts."""
    plain, drafted = World(SpeculationSettings(mode="off")), World(settings)
    for prompt in (PROMPT, PROMPT, PROMPT[::-1], [*PROMPT, 7]):
        expected = plain.generate(prompt, params, 60)
        assert drafted.generate(prompt, params, 60) == expected
    assert plain.num_rows == plain.num_steps
    assert drafted.num_steps <= plain.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "tree", "la"])
def test_sampled_output_keeps_its_distribution(mode: str) -> None:
    """Unseeded: the first three tokens of many answers fit the product of the model's distributions."""
    world = World(SpeculationSettings.model_validate({"mode": mode, "adaptive": False}))
    params = SamplingParams(temperature=0.7)
    num_answers = 1200
    seen: Counter[tuple[int, ...]] = Counter()
    for i in range(num_answers):
        seen[tuple(world.generate([3, 1], params, 3, seed_source=i))] += 1
    probability = {}
    for a, p_a in enumerate(torch.softmax(model([3, 1]).double() / 0.7, 0).tolist()):
        for b, p_b in enumerate(torch.softmax(model([1, a]).double() / 0.7, 0).tolist()):
            for c, p_c in enumerate(torch.softmax(model([a, b]).double() / 0.7, 0).tolist()):
                probability[a, b, c] = p_a * p_b * p_c
    counts = np.array([seen[answer] for answer in probability])
    assert counts.sum() == num_answers
    assert chi_square_fits(counts, np.array(list(probability.values())))
    assert world.drafter is not None
    assert world.num_accepted > 100


def test_an_answer_given_again_takes_a_step_for_many_tokens() -> None:
    world = World(SpeculationSettings(mode="auto"))
    first = world.generate(PROMPT, SamplingParams(seed=1, temperature=1.5), 120)
    before = world.num_steps
    assert world.generate(PROMPT, SamplingParams(seed=1, temperature=1.5), 120) == first
    assert world.num_steps - before <= 120 // 17 + 2


def test_where_rows_are_dear_and_drafts_fail_there_are_next_to_none() -> None:
    """A model that never repeats itself: after learning, under 2 % more time than without drafts."""
    world = World(SpeculationSettings(mode="auto"), row_s=0.3)
    params = SamplingParams(temperature=3.0, seed=2)
    world.generate(PROMPT, params, 500)
    steps, rows = world.num_steps, world.num_rows
    world.generate(PROMPT[::-1], params, 1500)
    steps, rows = world.num_steps - steps, world.num_rows - rows
    assert (steps + 0.3 * rows) / (1500 * 1.3) < 1.02


def test_other_tenants_tokens_are_never_drafted() -> None:
    """Given the same prompt, another namespace's drafts hold no more often than chance."""
    world = World(SpeculationSettings(mode="tree", adaptive=False))
    params = SamplingParams(temperature=1.0, seed=3)
    world.generate(PROMPT, params, 60)
    assert world.drafter is not None
    proposed = world.num_proposed
    world.generate(PROMPT, params, 60, namespace=Namespace("other"))
    assert world.num_proposed == proposed


def test_finished_sequences_leave_nothing_behind() -> None:
    sources: weakref.WeakSet[PromptLookup] = weakref.WeakSet()
    num_made = 0

    def make(_: Namespace) -> list[DraftSource]:
        nonlocal num_made
        num_made += 1
        source = PromptLookup(IndexMemory())
        sources.add(source)
        return [source]

    settings = SpeculationSettings(mode="prompt_lookup")
    world = World(settings)
    world.drafter = Drafter(make, settings, SuffixCorpus())
    world.generate(PROMPT, SamplingParams(temperature=0.0), 20)
    gc.collect()
    assert num_made == 1
    assert not sources


def test_a_full_batch_asks_for_no_drafts_and_a_small_one_does() -> None:
    """Rows cost what they cost where arithmetic bounds a step; the host's time for asking counts too."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.0005
        return now

    settings = SpeculationSettings(mode="prompt_lookup")
    drafter = Drafter(lambda _: [PromptLookup(IndexMemory())], settings, SuffixCorpus(), clock)
    for _ in range(200):  # ask, so that it is known what asking takes
        drafter.propose(1, DEFAULT_NAMESPACE, as_tokens([1, 2, 3, 4] * 3), 8)
    for step in range(400):
        num_rows = 60 + step % 9
        drafter.observe_step(num_rows, 64 * num_rows, num_rows, 0.010 + 0.0018 * num_rows)
    asked = sum(drafter.begin_step(64) for _ in range(1000))
    assert asked < 20
    assert all(drafter.begin_step(4) for _ in range(100))
    for step in range(400):  # a machine on which rows are free until far more of them
        num_rows = 60 + step % 9
        drafter.observe_step(num_rows, 64 * num_rows, num_rows, 0.100 + 0.0001 * num_rows)
    assert all(drafter.begin_step(64) for _ in range(100))
