"""Schedules of prompts that must not be seen in the logits."""

from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stemma.config.settings import KVDtype
from stemma.model.opened.causal_lm import CausalLM
from tests.model.paging import PagedSequences

BLOCK_SIZES = (1, 8, 16, 24, 64)
PROMPT = 330
"""Tokens: more than a split of attention's keys."""


def prompts_of(lengths: list[int], shared: list[int]) -> list[list[int]]:
    """Prompts of these lengths; each begins with so many tokens of the first."""
    first = [random.Random(0).randrange(3, 500) for _ in range(PROMPT)]
    return [
        first[:common] + [random.Random(number).randrange(3, 500) for _ in range(length - common)]
        for number, (length, common) in enumerate(zip(lengths, shared, strict=True), start=1)
    ]


def check_schedules(
    model: CausalLM, num_examples: int, kv_dtype: KVDtype = "auto", *, frees_windows: bool = False
) -> None:
    """Any schedule gives each prompt the logits that it has when it is computed alone and at once.

    With `frees_windows`, KV of layers with windows lies in pages in the schedules, and in blocks alone.
    """

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        num_prompts = data.draw(st.integers(1, 4), label="prompts")
        lengths = data.draw(
            st.lists(st.integers(2, PROMPT), min_size=num_prompts, max_size=num_prompts), label="lengths"
        )
        shared = [data.draw(st.integers(0, length - 1), label="shared") for length in lengths]
        prompts = prompts_of(lengths, shared)
        expected = [PagedSequences(model, [prompt], kv_dtype=kv_dtype) for prompt in prompts]
        for alone in expected:
            alone.finish(chunk=PROMPT)
        before = torch.get_num_threads()
        torch.set_num_threads(data.draw(st.sampled_from((1, 2)), label="threads"))
        try:
            block_size = data.draw(st.sampled_from(BLOCK_SIZES), label="block size")
            run = PagedSequences(
                model, prompts, block_size=block_size, kv_dtype=kv_dtype, frees_windows=frees_windows
            )
            run_schedule(run, data, shared)
        finally:
            torch.set_num_threads(before)
        for alone, logits in zip(expected, run.logits, strict=True):
            assert logits.equal(alone.logits[0])

    check()


def run_schedule(run: PagedSequences, data: st.DataObject, shared: list[int]) -> None:
    """Steps of any mix; a prompt may begin with what another one has computed."""
    waiting = set(range(1, len(shared)))
    seed = random.Random(data.draw(st.integers(0, 1 << 30), label="schedule"))
    while any(done < len(prompt) for done, prompt in zip(run.done, run.prompts, strict=True)):
        for target in sorted(waiting):
            if run.done[target] == 0 and seed.random() < 0.5:
                waiting.discard(target)
                common = min(shared[0], shared[target], run.done[0])
                if common and not run.has_states and seed.random() < 0.7:
                    run.reuse(0, target, common)
        plan = []
        for number, prompt in enumerate(run.prompts):
            left = len(prompt) - run.done[number]
            if number in waiting or left == 0 or seed.random() < 0.2:
                continue
            plan.append((number, min(left, seed.choice((1, 1, 2, 7, 16, 33, 100, PROMPT)))))
        seed.shuffle(plan)
        if plan:
            run.step(plan)
