"""Beam search against a brute-force one over plain transformers, and against transformers' own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stemma import LLM
from stemma.engine.api import GenerationRequest
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.beam_search import BeamSearch, run_beam_search
from stemma.engine.build import build_engine
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.errors import GenerationFailed, InvalidRequest, Overloaded, ShuttingDown
from stemma.types import FinishReason, Tier
from tests.checkpoints import build
from tests.engine.harness import prompt

ENDS = list(range(0, 500, 12))
"""Many tokens end a text here, so that searches meet them."""
PROMPTS = [prompt(seed, length) for seed, length in ((1, 5), (2, 37), (3, 16))]
SETTINGS = {"kv_cache_memory": "2MB", "block_size": 16}


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("ending"), generation={"eos_token_id": ENDS})


@pytest.fixture(scope="module")
def plain(ending):
    return AutoModelForCausalLM.from_pretrained(ending, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(ending) -> LLM:
    return LLM(ending, **SETTINGS)


@pytest.fixture
def engine(ending):
    engine = AsyncEngine.from_settings(engine_settings(ending, **SETTINGS))
    yield engine
    engine.close()


def brute_force(plain, tokens, width, max_tokens, length_penalty, ends):
    """Return [(token ids, score)], by whole forward passes and without stopping early."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        grown: list[tuple[tuple[int, ...], float]] = []
        for ids, total in live:
            with torch.inference_mode():
                logits = plain(torch.tensor([[*tokens.tolist(), *ids]])).logits[0, -1]
            values, best = torch.log_softmax(logits, -1).topk(2 * width)
            for value, token in zip(values.tolist(), best.tolist(), strict=True):
                (done if token in ends else grown).append(((*ids, token), total + value))
        live = sorted(grown, key=lambda one: -one[1])[:width]
    scored = [(list(ids), total / len(ids) ** length_penalty) for ids, total in done + live]
    return sorted(scored, key=lambda one: -one[1])[:width]


def request(name="a", width=3, max_tokens=8, tokens=PROMPTS[1], **params) -> GenerationRequest:
    sampling = SamplingParams(**{"n": width, "max_tokens": max_tokens} | params)
    return GenerationRequest(name, tokens, sampling, beam=BeamParams(width))


async def run(engine, req):
    [output] = [output async for output in run_beam_search(engine, req)]
    return output


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, -1.0, 2.5])
def test_equals_brute_force(llm, plain, width, ignore_eos, length_penalty):
    found = llm.beam_search(PROMPTS, width, 7, length_penalty=length_penalty, ignore_eos=ignore_eos)
    num_stopped = 0
    for tokens, generation in zip(PROMPTS, found, strict=True):
        expected = brute_force(plain, tokens, width, 7, length_penalty, () if ignore_eos else ENDS)
        assert [c.token_ids for c in generation.completions] == [ids for ids, _ in expected]
        assert [c.score for c in generation.completions] == pytest.approx([s for _, s in expected], abs=1e-4)
        for completion in generation.completions:
            stopped = completion.finish_reason is FinishReason.STOP
            num_stopped += stopped
            assert stopped == (not ignore_eos and completion.token_ids[-1] in ENDS)
            kept = completion.token_ids[:-1] if stopped else completion.token_ids
            assert completion.text == llm.tokenizer.decode(kept)
    assert num_stopped or ignore_eos or width == 1
    llm.engine.check()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", PROMPTS, ids=len)
def test_equals_transformers_where_no_text_ends(llm, plain, width, tokens):
    ours = llm.beam_search(tokens, width, 9, ignore_eos=True)[0].completions
    theirs = hf_search(plain, tokens, width, 9, None)
    ids = theirs.sequences[:, len(tokens) :].tolist()
    assert [c.token_ids for c in ours] == ids
    assert [c.score for c in ours] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", PROMPTS, ids=len)
def test_never_worse_than_transformers_where_texts_end(llm, plain, width, tokens):
    """Theirs takes an end only if it is among the `width` best candidates of a round, ours (vLLM's) any."""
    ours = [c.score for c in llm.beam_search(tokens, width, 9)[0].completions]
    theirs = hf_search(plain, tokens, width, 9, ENDS).sequences_scores.tolist()
    assert all(own >= other - 1e-4 for own, other in zip(ours, theirs, strict=True))


def hf_search(plain, tokens, width, max_tokens, ends):
    return plain.generate(
        torch.tensor([tokens.tolist()]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        early_stopping="never",
        eos_token_id=ends,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
    )


@pytest.mark.parametrize("fields", [{"enable_prefix_cache": False}, {"index": "hash"}])
def test_the_cache_changes_nothing(llm, ending, fields):
    other = LLM(ending, **SETTINGS, **fields)
    asked = [tokens.tolist() for tokens in PROMPTS]
    ours, theirs = (one.beam_search(asked, 3, 20) for one in (llm, other))
    assert [[c.token_ids for c in g.completions] for g in ours] == [
        [c.token_ids for c in g.completions] for g in theirs
    ]
    other.engine.check()


def test_a_round_costs_a_token_a_beam_and_the_prompt_counts_once(ending, monkeypatch):
    llm = LLM(ending, **SETTINGS)
    forward, sizes = llm.engine.runner.forward, []

    def count(rows):
        sizes.append(rows.num_rows)
        return forward(rows)

    monkeypatch.setattr(llm.engine.runner, "forward", count)
    cold = llm.beam_search(PROMPTS[1].tolist(), 4, 6, ignore_eos=True)[0]
    assert sizes == [37, 4, 4, 4, 4, 4]
    assert cold.cache.num_cached_tokens == 0
    assert (llm.stats().num_prompt_tokens, llm.stats().cached_tokens_by_tier) == (37, {})
    warm = llm.beam_search(PROMPTS[1].tolist(), 4, 6, ignore_eos=True)[0]
    assert warm.cache.num_cached_tokens == 36
    assert [c.token_ids for c in warm.completions] == [c.token_ids for c in cold.completions]


def test_it_stops_once_nothing_can_change(ending, llm, plain):
    """With a penalty that favours short answers, the first ends decide; the result is that of all rounds."""
    req = replace(request(max_tokens=1000), beam=BeamParams(3, -2.0))
    search = BeamSearch(req, ENDS, 2048)
    num_rounds = 0
    while not search.is_done:
        asked = search.requests()
        found = llm.generate([one.prompt_token_ids for one in asked], [one.params for one in asked])
        search.advance([one.completions[0].logprobs[0] for one in found])
        num_rounds += 1
    assert num_rounds < 30
    expected = brute_force(plain, PROMPTS[1], 3, num_rounds + 4, -2.0, ENDS)
    assert [list(h.token_ids) for h in search.result()] == [ids for ids, _ in expected]


async def test_async_gives_the_same_in_one_output(engine, llm):
    expected = llm.beam_search(PROMPTS[1].tolist(), 3, 8)[0].completions
    output = await run(engine, request(logprobs=2))
    assert output.finished
    assert [list(d.token_ids) for d in output.deltas] == [c.token_ids for c in expected]
    assert [d.text for d in output.deltas] == [c.text for c in expected]
    assert [d.finish_reason for d in output.deltas] == [c.finish_reason for c in expected]
    assert {len(entry.top) for d in output.deltas for entry in d.logprobs} == {2}
    assert output.num_generated_tokens == sum(len(c.token_ids) for c in expected)
    assert (output.cache.num_prompt_tokens, output.cache.num_cached_tokens) == (37, 0)
    assert (await engine.stats()).num_prompt_tokens == 37
    best = await run(engine, replace(request(n=2), beam=BeamParams(3)))
    assert [d.token_ids for d in best.deltas] == [d.token_ids for d in output.deltas[:2]]
    await engine.check()


async def test_stop_tokens_end_hypotheses(engine):
    free = await run(engine, request(ignore_eos=True))
    stop = free.deltas[0].token_ids[0]
    short = BeamParams(3, -5.0)
    output = await run(engine, replace(request(ignore_eos=True, stop_token_ids=(stop,)), beam=short))
    assert any(d.stop_reason == stop for d in output.deltas)
    assert all(stop not in d.token_ids[:-1] for d in output.deltas)


async def test_the_context_bounds_the_search(ending):
    engine = AsyncEngine.from_settings(engine_settings(ending, **SETTINGS, max_model_len=42))
    output = await run(engine, request(max_tokens=None, ignore_eos=True))
    assert {len(d.token_ids) for d in output.deltas} == {5}
    assert {d.finish_reason for d in output.deltas} == {FinishReason.LENGTH}
    with pytest.raises(InvalidRequest):
        await run(engine, request(tokens=prompt(1, 50)))
    engine.close()


async def test_cancelling_leaves_nothing(engine):
    tasks = [
        asyncio.create_task(run(engine, request(f"r{i}", tokens=PROMPTS[i], max_tokens=900, ignore_eos=True)))
        for i in range(3)
    ]
    while (await engine.stats()).num_generated_tokens < 40:
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await engine.drain(0.0), "a search is open"
    while (await engine.stats()).num_running:
        await asyncio.sleep(0.005)
    await engine.check()
    assert (await engine.cache_control.flush()).freed_blocks[Tier.DEVICE] > 0
    stats = await engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


async def test_a_drain_waits_for_a_search(engine):
    task = asyncio.create_task(run(engine, request(max_tokens=60, ignore_eos=True)))
    while not (await engine.stats()).num_generated_tokens:
        await asyncio.sleep(0.001)
    assert await engine.drain(60.0)
    assert {len(d.token_ids) for d in (await task).deltas} == {60}
    with pytest.raises(ShuttingDown):
        await run(engine, request("late"))


async def test_a_drain_that_is_over_ends_a_search_with_the_best_so_far(engine):
    task = asyncio.create_task(run(engine, request(max_tokens=1500, ignore_eos=True)))
    while (await engine.stats()).num_generated_tokens < 20:
        await asyncio.sleep(0.001)
    assert not await engine.drain(0.0)
    while not task.done():  # an abort may fall between two rounds
        await engine.drain(0.0)
        await asyncio.sleep(0)
    deltas = (await task).deltas
    assert {d.finish_reason for d in deltas} == {FinishReason.ABORT}
    assert len(deltas[0].token_ids) >= 6
    await engine.check()


@pytest.mark.parametrize("max_waiting", [0, 1])
async def test_a_full_queue_refuses_the_first_round_alone(ending, max_waiting):
    settings = engine_settings(ending, **SETTINGS)
    engine = AsyncEngine(lambda supervisor: build_engine(settings, None, supervisor), max_waiting=max_waiting)
    if max_waiting == 0:
        with pytest.raises(Overloaded):
            await run(engine, request())
    else:
        assert len((await run(engine, request(width=4))).deltas) == 4
    engine.close()


async def test_a_failing_step_fails_the_search(engine):
    runner = engine.parts.engine.runner
    forward, num_steps = runner.forward, 0

    def fail_third(rows):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise RuntimeError("the device is on fire")
        return forward(rows)

    runner.forward = fail_third
    with pytest.raises(GenerationFailed, match="on fire"):
        await run(engine, request())
    assert (await run(engine, request())).finished
    await engine.check()


async def test_bad_searches_are_refused(engine):
    for width, length_penalty in ((0, 1.0), (11, 1.0), (2, float("nan")), (2, 11.0)):
        with pytest.raises(InvalidRequest):
            BeamParams(width, length_penalty)
    with pytest.raises(InvalidRequest, match="run_beam_search"):
        await anext(engine.generate(request()))
    with pytest.raises(InvalidRequest, match="empty"):
        await run(engine, request(tokens=np.empty(0, np.int32)))


def test_beams_go_on_in_their_blocks(ending):
    """One child takes what its parent held, so of a round's beams only further children copy."""
    llm = LLM(ending, **SETTINGS)
    cache = llm.engine.cache
    llm.beam_search(PROMPTS[1].tolist(), 1, 12, ignore_eos=True)
    # The first round goes on from the cached prompt, the others from where the round before ended.
    assert cache.stats().num_copied_heads == 1
    llm.engine.use_idle_time()
    assert cache.num_available == cache.num_blocks
    num_copied = cache.stats().num_copied_heads
    llm.beam_search(PROMPTS[2].tolist(), 4, 12, ignore_eos=True)
    assert cache.stats().num_copied_heads - num_copied <= 4 + 10 * 3
    llm.engine.use_idle_time()
    assert cache.num_available == cache.num_blocks
    llm.engine.check()
