"""Steps overlap where drafts don't pay, and are drafted where they do; the tokens are the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stemma.engine.core.overlap import StepsAhead
from stemma.engine.drafts.drafter import Drafter
from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from tests.checkpoints import build

NUM_TOKENS = 24
PROMPTS = [[5 + (7 * n + seed) % 40 for n in range(20 + 3 * seed)] for seed in range(6)]
PARAMS = [
    SamplingParams(temperature=0.0 if n % 2 else 0.8, seed=n, max_tokens=NUM_TOKENS, ignore_eos=True)
    for n in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "llama"
    build("llama", path)
    return path


def answers(path: Path, **settings: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts, twice each, and how many drafted tokens were verified."""
    options: dict[str, Any] = {"block_size": 16, "max_batch_tokens": 48, "kv_cache_memory": "4MB"}
    llm = LLM(path, **(options | settings))
    try:
        found = [one.completions[0].token_ids for _ in range(2) for one in llm.generate(PROMPTS, PARAMS)]
        llm.engine.check()
        return found, sum(count.num_proposed for count in llm.engine.stats().drafts_by_source.values())
    finally:
        llm.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_tokens_are_the_same_wherever_drafts_pay(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """A drafter that is asked in some steps, by chance: between them steps are launched ahead."""
    expected, _ = answers(checkpoint, speculation="off")
    chance, flights, asked = random.Random(7), [0], [0]

    def begin_step(_self: Drafter, _num: int, *, may_be_forced: bool = False) -> bool:
        wanted = chance.random() < share
        asked[0] += wanted
        return wanted

    launch = StepsAhead.launch

    def counted(*args: Any) -> None:
        flights[0] += 1
        launch(*args)

    monkeypatch.setattr(Drafter, "begin_step", begin_step)
    monkeypatch.setattr(StepsAhead, "launch", counted)
    found, num_drafted = answers(checkpoint, speculation="auto", overlap_schedule="on")
    assert found == expected
    assert (num_drafted > 0) == (share > 0)
    assert (asked[0] > 0) == (share > 0)
    assert flights[0] > (2 * NUM_TOKENS if share == 0.0 else 0)
