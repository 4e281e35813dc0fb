"""Steps launched ahead: the same tokens as in turn, nothing reused too early, and what has to wait waits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.harness import greedy, prompt

from stemma.config.settings import EngineSettings, ModelSettings, SchedulerSettings, SpeculationSettings
from stemma.engine.build import open_queue
from stemma.engine.core.overlap import StreamQueue, ThreadQueue
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampler, draw_tokens, plan_rows_ahead
from stemma.engine.sampling.state import SamplingState
from stemma.types import FinishReason

VOCAB = 512


def make(harness, **options):
    """An engine whose device is slow: the next step is written down long before this one reads its inputs."""
    engine = harness(overlaps=True, **options)
    engine.runner.device_delay_s = 0.002
    return engine


@st.composite
def sampling(draw) -> SamplingParams:
    """Everything that decides a token, and what makes a step wait its turn."""
    num_tokens = draw(st.integers(1, 12))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 3])),
        seed=draw(st.integers(0, 3)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 5, 400])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
        stop=draw(st.sampled_from([(), ("a",)])),
        stop_token_ids=tuple(range(0, VOCAB, draw(st.sampled_from([3, 1000])))),
        max_tokens=num_tokens,
        min_tokens=draw(st.integers(0, num_tokens)),
        logprobs=draw(st.sampled_from([None, 2])),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 50), sampling(), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
    config=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 4, 16]),
            "max_batch_tokens": st.sampled_from([3, 16, 256]),
            "max_num_seqs": st.sampled_from([2, 64]),
            "enable_prefix_cache": st.booleans(),
        }
    ),
    num_spare=st.integers(0, 60),
)
def test_answers_are_those_of_steps_in_turn(harness, arrivals, config, num_spare):
    config["num_blocks"] = -(-(62 + num_spare) // config["block_size"])
    in_turn, ahead = harness(**config), make(harness, **config)
    for engine in (in_turn, ahead):
        for seed, num_prompt, params, num_steps in arrivals:
            engine.add(prompt(seed, num_prompt), params)
            for _ in range(num_steps):
                engine.step()
                engine.engine.check()
        engine.run(check=True)
        engine.cache.flush()
        assert engine.cache.stats().num_free_blocks == config["num_blocks"]
    for request_id, expected in in_turn.answers.items():
        got = ahead.answers[request_id]
        for name in ("token_ids", "text", "finish", "stop_reason"):
            assert asdict(got)[name] == asdict(expected)[name]


def test_decodes_run_ahead(harness):
    engine = make(harness, num_blocks=32, block_size=8)
    for seed in range(3):
        engine.add(prompt(seed, 20), greedy(10))
    engine.step()
    assert engine.runner.num_ahead == 1
    assert not any(a.token_ids for a in engine.answers.values())  # nothing is known yet
    engine.run()
    # Who ends by number of tokens is known ahead: no step and no token too many.
    assert engine.runner.num_ahead == len(engine.runner.plans) == 10
    assert engine.runner.num_computed == 3 * (20 + 9)


def test_the_token_behind_the_last_is_dropped(harness):
    plain, engine = harness(num_blocks=32, block_size=8), make(harness, num_blocks=32, block_size=8)
    tokens = prompt(34, 10)
    full = plain.serve(tokens, greedy(8)).token_ids[0]
    num_taken = full.index(full[4]) + 1
    engine.add(tokens, greedy(8, stop_token_ids=(full[4],)), request_id="a")
    while not engine.answers["a"].finished:
        engine.step()
    assert engine.answers["a"].token_ids[0] == full[:num_taken]
    assert engine.engine.has_work  # the step that computes one token too many
    assert engine.runner.num_computed == 10 + num_taken
    held = engine.cache.num_available
    engine.run()
    assert engine.cache.num_available > held
    assert engine.engine.stats().num_generated_tokens == num_taken
    again = engine.serve(np.concatenate([tokens, np.array(full, dtype=np.int32)]), greedy(3))
    assert again.cache.num_cached_tokens == 10 + num_taken - 1


@pytest.mark.parametrize("what", [{"n": 3}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}])
def test_what_needs_the_host_runs_in_turn(harness, what):
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, **what)
    engine = make(harness, num_blocks=32, block_size=8)
    assert engine.serve(prompt(1, 9), params).token_ids == harness().serve(prompt(1, 9), params).token_ids
    # Siblings overlap once they are forked; penalties need each token.
    assert engine.runner.num_ahead == (5 if "n" in what else 0)


def test_drafts_run_in_turn_and_prefill_ahead(harness):
    drafts = {"speculation": "prompt_lookup", "speculation_adaptive": False}
    engine = make(harness, num_blocks=32, block_size=8, max_batch_tokens=16, **drafts)
    tokens = np.concatenate([prompt(1, 30), prompt(1, 30)])
    plain = harness(num_blocks=32, block_size=8)
    assert engine.serve(tokens, greedy(8)).token_ids == plain.serve(tokens, greedy(8)).token_ids
    assert engine.runner.num_ahead == 4  # the chunks, the last of which draws the first token
    assert len(engine.runner.plans) > 4


def test_nobody_yields_while_a_step_is_under_way(harness):
    config = {"num_blocks": 9, "block_size": 8, "max_batch_tokens": 32}
    engines = harness(**config), make(harness, **config)
    for engine in engines:
        for i in range(5):
            engine.add(prompt(10 + i, 12 + 3 * i), greedy(30))
        engine.run(check=True)
        assert engine.engine.stats().num_preemptions > 0
    assert [a.token_ids for a in engines[0].answers.values()] == [
        a.token_ids for a in engines[1].answers.values()
    ]


def test_a_step_that_fails_on_the_device_ends_its_requests_only(harness):
    """The step behind it read what was never drawn: those of its requests that are new run again."""
    engine = make(harness, num_blocks=64, block_size=8)
    engine.runner.failing_run = 3
    engine.add(prompt(1, 20), greedy(8), request_id="bad")
    for _ in range(3):
        engine.step()
    engine.add(prompt(2, 20), greedy(8), request_id="good")
    engine.step()  # launches a step of both behind the one that fails
    engine.engine.check()
    assert engine.answers["bad"].finish == {0: FinishReason.ERROR}
    assert "on fire" in engine.answers["bad"].error
    assert engine.runner.plans[-1] == [("bad", 22, 1), ("good", 0, 20)]
    engine.run(check=True)
    assert engine.answers["good"].token_ids == harness().serve(prompt(2, 20), greedy(8)).token_ids


def test_fail_all_leaves_nothing_behind(harness):
    engine = make(harness, num_blocks=32, block_size=8)
    for seed in range(3):
        engine.add(prompt(seed, 20), greedy(10))
    engine.step()
    engine.step()
    engine.fail_all("a bug")
    assert not engine.engine.has_work
    engine.engine.check()
    engine.cache.flush()
    assert engine.cache.stats().num_free_blocks == 32
    engine.serve(prompt(9, 9))


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_k": 5, "top_p": 0.5},
    {"top_k": 300, "top_p": 0.95},
    {"min_p": 0.05},
    {"top_p": 0.99, "min_tokens": 9},
)


def rows() -> list[SamplingParams]:
    """One of each kind; every other one wants log-probabilities."""
    kinds: list[tuple[float, dict[str, Any]]] = [(0.0, {}), (0.0, {"min_tokens": 9})]
    kinds += [(temperature, options) for temperature in (0.5, 1.0, 3.0) for options in OPTIONS]
    return [
        SamplingParams(temperature=t, max_tokens=20, seed=i, logprobs=i % 4 or None, **options)
        for i, (t, options) in enumerate(kinds)
    ]


@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("vocab_size", [500, 4096])
def test_draws_that_read_no_value_are_the_same(vocab_size, spread):
    """Equal logits (spread 0) test the ties; little spread a nucleus of hundreds of tokens."""
    params = rows() * 4
    generator = torch.Generator().manual_seed(vocab_size)
    logits = spread * torch.randn(len(params), vocab_size, generator=generator)
    logits = (logits * 8).round() / 8  # ties
    states = [
        SamplingState(p, [1, 2, 3], vocab_size, index=i, ending=EndingRule.of(p, [5], 100))
        for i, p in enumerate(params)
    ]
    plan = plan_rows_ahead(states, [0] * len(states))
    expected = Sampler().sample(logits, states)
    got = draw_tokens(logits, plan, may_wait=False).read()
    assert got.token_ids == expected.token_ids
    assert got.logprobs == expected.logprobs
    ahead = plan_rows_ahead(states, [1] * len(states))
    for state in states:
        state.append(1)
    assert (
        draw_tokens(logits, ahead, may_wait=False).read().token_ids
        == Sampler().sample(logits, states).token_ids
    )


def test_where_steps_overlap(tmp_path):
    def queue(overlap: str, mode: str, device: str, gpu_path: str = "modules"):
        engine = EngineSettings(
            model=ModelSettings.model_validate({"path": tmp_path, "gpu_path": gpu_path}),
            scheduler=SchedulerSettings.model_validate({"overlap_schedule": overlap}),
            speculation=SpeculationSettings.model_validate({"mode": mode}),
        )
        return open_queue(engine, torch.device(device))

    assert queue("auto", "off", "cpu") is None
    assert queue("auto", "auto", "cuda") is None
    assert isinstance(queue("auto", "off", "cuda"), StreamQueue)
    assert isinstance(queue("auto", "auto", "cuda", "fused"), StreamQueue)
    assert isinstance(queue("on", "auto", "cuda"), StreamQueue)
    assert queue("off", "off", "cuda") is None
    threads = queue("on", "auto", "cpu")
    assert isinstance(threads, ThreadQueue)
    threads.close()
