"""When the model's own guesses pay: a simulated model, layer and clock."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.engine.drafts.known_cost import KnownCost

from stemma.config.settings import SpeculationSettings
from stemma.engine.drafts.drafter import DraftAsk, Drafter
from stemma.engine.drafts.predicted import Predicted, best_depth
from stemma.engine.drafts.source import DraftSource, Proposal
from stemma.engine.drafts.suffix import SuffixCorpus
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import TokenArray

NUM_TOKENS = 1200
"""Of each text."""


class Copier(DraftSource):
    """A free source that proposes the text with this share of right tokens."""

    def __init__(self, text: list[int], accuracy: float) -> None:
        self.text, self.accuracy, self.rng = text, accuracy, random.Random(1)

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        right = self.text[len(tokens) : len(tokens) + min(8, max_tokens)]
        draft = tuple(t if self.rng.random() < self.accuracy else t + 1 for t in right)
        return Proposal(draft, "lookup-long") if draft else None

    def observe(self, tokens: TokenArray, draft: object, drawn: object) -> None:
        pass

    def close(self) -> None:
        pass


def simulate(
    accuracy: float, *, row_s: float, pass_s: float, batch: int = 1, copying: float | None = None
) -> tuple[float, dict[str, int]]:
    """Decode `batch` texts; return the time as a share of that without drafts, and drafts by source.

    A step takes 1 s and `row_s` for each row.
    """
    rng = random.Random(0)
    texts = [[rng.randrange(100_000) for _ in range(NUM_TOKENS)] for _ in range(batch)]
    lengths, time_s = [1] * batch, 0.0
    current = [texts[0]]

    def sources(_: object) -> list[DraftSource]:
        return [] if copying is None else [Copier(current[0], copying)]

    drafter = Drafter(sources, SpeculationSettings(mode="mtp", mtp_tokens=3), SuffixCorpus())
    while active := [i for i in range(batch) if lengths[i] < len(texts[i])]:
        tokens = {i: np.array(texts[i][: lengths[i]], dtype=np.int32) for i in active}
        most = {i: len(texts[i]) - lengths[i] - 1 for i in active}
        drafts: dict[int, tuple[int, ...]] = dict.fromkeys(active, ())
        passes = 0
        if drafter.begin_step(len(active)):
            wanted = drafter.num_to_predict(
                [DraftAsk(i, DEFAULT_NAMESPACE, tokens[i], most[i]) for i in active]
            )
            passes = max(wanted)
            for i, num in zip(active, wanted, strict=True):
                right = texts[i][lengths[i] : lengths[i] + num]
                drafter.offer(i, lengths[i], [t if rng.random() < accuracy else t + 1 for t in right])
            if passes:
                drafter.observe_passes(passes, passes * pass_s)
            drafts = {i: drafter.propose(i, DEFAULT_NAMESPACE, tokens[i], most[i]) for i in active}
        rows = taken = 0
        for i in active:
            drawn = texts[i][lengths[i] : lengths[i] + len(drafts[i]) + 1]
            held = next((j for j, t in enumerate(drafts[i]) if t != drawn[j]), len(drafts[i]))
            drafter.observe(i, tokens[i], drafts[i], drawn)
            rows += 1 + len(drafts[i])
            taken += held + 1
            lengths[i] += held + 1
        seconds = 1 + row_s * rows + passes * pass_s
        drafter.observe_step(rows, 100, taken, seconds)
        time_s += seconds
    plain_s = (NUM_TOKENS - 1) * (1 + row_s * batch)
    return time_s / plain_s, {name: count.num_proposed for name, count in drafter.counts.items()}


@pytest.mark.parametrize(("accuracy", "pass_s", "most"), [(0.9, 0.05, 0.45), (0.6, 0.1, 0.75)])
def test_good_guesses_save_time(accuracy: float, pass_s: float, most: float) -> None:
    share, _ = simulate(accuracy, row_s=0.02, pass_s=pass_s)
    assert share < most


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 6, 30])
@pytest.mark.parametrize(
    ("accuracy", "row_s", "pass_s"), [(0.0, 0.02, 0.1), (0.2, 0.3, 0.4), (0.95, 0.02, 1.2), (0.1, 0.01, 0.1)]
)
def test_never_slower_by_more_than_two_percent(
    accuracy: float, row_s: float, pass_s: float, batch: int
) -> None:
    """Bad guesses, dear rows, or passes that cost more than they save."""
    share, _ = simulate(accuracy, row_s=row_s, pass_s=pass_s, batch=batch)
    assert share < 1.02


def test_free_drafts_that_hold_are_taken_instead() -> None:
    share, proposed = simulate(0.9, row_s=0.02, pass_s=0.2, copying=0.99)
    assert share < 0.3
    assert proposed.get("mtp", 0) < 0.1 * proposed["prompt_lookup"]


def test_a_guess_is_for_one_state_of_the_sequence() -> None:
    predicted = Predicted()
    predicted.offer(5, [1, 2, 3])
    assert predicted.take(6, 3) is None
    predicted.offer(6, [4, 5, 6])
    assert predicted.take(6, 2) == Proposal((4, 5), "mtp")
    assert predicted.take(6, 2) is None


def test_depth_is_chosen_for_all_together() -> None:
    cost = KnownCost(0.05)
    assert best_depth([], [], [], cost, 0.1) == (0, [])
    assert best_depth([0.9], [0.0], [4], cost, 0.1)[0] == 4
    assert best_depth([0.9], [0.0], [4], cost, 0.9) == (0, [False])
    assert best_depth([0.9, 0.9, 0.9], [0.0] * 3, [1] * 3, cost, 0.9) == (1, [True] * 3)
    assert best_depth([0.9, 0.01], [0.0, 0.0], [2, 2], cost, 0.1) == (2, [True, False])
    assert best_depth([0.9], [5.0], [4], cost, 0.1) == (0, [False])
