"""The engine behind asyncio: streams, aborts, errors, drain; the event loop never blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, pairwise
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from stemma.engine import async_engine
from stemma.engine.api import GenerationRequest
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.build import build_engine
from stemma.engine.core.scheduler import Scheduler
from stemma.engine.llm import engine_settings
from stemma.engine.output import joining
from stemma.engine.output.output import OutputProcessor
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import InvalidRequest, Overloaded, PromptTooLong, RateLimited, ShuttingDown
from stemma.memory.device.kv import DeviceKV
from stemma.model.opened.causal_lm import CausalLM
from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.keys import Namespace
from stemma.types import FinishReason, Tier
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt


@pytest.fixture
def moments(monkeypatch):
    """Return a list of what happens in engines made from now on; begins with news put into a queue."""
    seen: list[str] = []

    class NotingQueue(SimpleQueue):
        def put(self, item, block=True, timeout=None):
            if isinstance(item, list):  # commands aren't
                seen.append("passed on")
            super().put(item)

    monkeypatch.setattr(joining, "SimpleQueue", NotingQueue)
    return seen


@pytest.fixture
def processors(monkeypatch):
    """Return the list of the processors of engines made from now on."""
    made: list[OutputProcessor] = []

    def make(tokenizer):
        made.append(OutputProcessor(tokenizer))
        return made[-1]

    monkeypatch.setattr(async_engine, "OutputProcessor", make)
    return made


@pytest.fixture(params=["off", "on"])
def engine(checkpoint, request):
    overlap = {"overlap_schedule": request.param, "speculation": "off" if request.param == "on" else "auto"}
    settings = engine_settings(
        checkpoint, kv_cache_memory="2MB", block_size=16, max_waiting=20, stream_interval_ms=0, **overlap
    )
    engine = AsyncEngine.from_settings(settings)
    yield engine
    engine.close()


async def test_streams_tokens_as_they_come(engine):
    outputs = await collect(engine, request("a", prompt(1, 20)))
    assert len(outputs) == 6
    assert [o.finished for o in outputs] == [False] * 5 + [True]
    assert outputs[-1].deltas[0].finish_reason is FinishReason.LENGTH
    assert outputs[-1].num_generated_tokens == 6
    assert all(o.cache.num_prompt_tokens == 20 for o in outputs)
    again = await collect(engine, request("a", prompt(1, 20)))
    assert again[0].cache.num_cached_tokens == 19
    text = "".join(d.text for o in outputs for d in o.deltas)
    assert text == "".join(d.text for o in again for d in o.deltas)


async def test_many_at_once_and_nothing_left(engine):
    shared = prompt(2, 40)
    requests = [
        request(f"r{i}", np.concatenate([shared, prompt(10 + i, 5)]), greedy(5, n=1 + i % 3))
        for i in range(20)
    ]
    results = await asyncio.gather(*(collect(engine, r) for r in requests))
    assert all(r[-1].finished for r in results)
    await engine.check()
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_generated_tokens == sum(5 * r.params.n for r in requests)


async def test_news_of_a_step_are_passed_on_while_the_next_one_computes(moments, engine, monkeypatch):
    """Neither while Python prepares the next step, nor only once that has ended."""
    core = engine.parts.engine
    step = core.step

    def noting_step():
        moments.append("step begins")
        news = step()
        moments.append("step ends")
        return news

    monkeypatch.setattr(core, "step", noting_step)
    await collect(engine, request("a", prompt(1, 20), greedy(40)))
    passed = [before for before, moment in pairwise(moments) if moment == "passed on"]
    assert passed.count("step begins") >= 30
    assert "step ends" not in passed[:-1]


async def test_joined_steps_give_the_same_tokens_first_and_last_at_once(checkpoint):
    settings = engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16, stream_interval_ms=1000)
    engine = AsyncEngine.from_settings(settings)
    try:
        requests = [request(f"r{i}", prompt(i, 20), greedy(40, n=1 + i % 2)) for i in range(4)]
        joined = await asyncio.gather(*(collect(engine, r) for r in requests))
        await engine.check()
    finally:
        engine.close()
    settings = engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16, stream_interval_ms=0)
    engine = AsyncEngine.from_settings(settings)
    try:
        apart = await asyncio.gather(*(collect(engine, r) for r in requests))
    finally:
        engine.close()
    for mine, plain in zip(joined, apart, strict=True):
        assert len(mine) < len(plain)
        assert [len(delta.token_ids) for delta in mine[0].deltas] == [1] * len(mine[0].deltas)
        for index in range(len(mine[0].deltas)):
            whole = [[d for o in outputs for d in o.deltas if d.index == index] for outputs in (mine, plain)]
            tokens = [[token for d in deltas for token in d.token_ids] for deltas in whole]
            assert tokens[0] == tokens[1]
            assert [d.finish_reason for d in whole[0][:-1]] == [None] * (len(whole[0]) - 1)
            assert whole[0][-1].finish_reason is FinishReason.LENGTH
        assert mine[-1].finished
        assert mine[-1].num_generated_tokens == plain[-1].num_generated_tokens


async def test_held_tokens_of_a_request_are_counted_until_it_is_cut_off(checkpoint, monkeypatch):
    """The ninth step hangs, so those before it stay held."""
    go_on, hangs = threading.Event(), threading.Event()
    num_steps = 0
    forward = CausalLM.forward

    def hanging(self, batch, kv):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 9:
            batch.on_launch()
            hangs.set()
            assert go_on.wait(60)
        return forward(self, batch, kv)

    settings = engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16, speculation="off")
    engine = AsyncEngine(
        lambda supervisor: build_engine(settings, None, supervisor), max_waiting=9, stream_interval_s=600.0
    )
    told = 0

    async def read() -> None:
        nonlocal told
        async with aclosing(engine.generate(request("a", prompt(1, 20), greedy(40)))) as stream:
            async for output in stream:
                told = output.num_generated_tokens

    try:
        await collect(engine, request("w", prompt(2, 20)))  # the output thread is there
        monkeypatch.setattr(CausalLM, "forward", hanging)
        reading = asyncio.create_task(read())
        assert await asyncio.to_thread(hangs.wait, 60)
        deadline = time.monotonic() + 60
        while told + engine.num_held_tokens("a") != 8:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert engine.num_held_tokens("a") >= 6
        assert engine.num_held_tokens("b") == 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        go_on.set()
        await engine.stats()  # behind the abort
        assert engine.num_held_tokens("a") == 0
    finally:
        go_on.set()
        engine.close()


@pytest.mark.parametrize(("num_spare", "interval_s"), [(0, 1 / 15), (-1, 1 / 15), (1, 0.0)])
def test_tokens_are_held_by_default_where_the_models_threads_fill_all_cores(
    checkpoint, monkeypatch, num_spare, interval_s
):
    parts = build_engine(engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16))
    monkeypatch.setattr(async_engine, "usable_cores", lambda: torch.get_num_threads() + num_spare)
    assert async_engine.joining_interval_s(parts) == interval_s
    parts.engine.close()


async def test_held_tokens_arrive_though_a_step_hangs(checkpoint, monkeypatch):
    """By their deadline, without the step loop's help; the steps before were quick."""
    go_on = threading.Event()
    num_steps = 0
    forward = CausalLM.forward

    def hanging(self, batch, kv):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 9:
            batch.on_launch()
            assert go_on.wait(60)
        return forward(self, batch, kv)

    settings = engine_settings(
        checkpoint, kv_cache_memory="2MB", block_size=16, stream_interval_ms=200, speculation="off"
    )
    engine = AsyncEngine.from_settings(settings)
    try:
        monkeypatch.setattr(CausalLM, "forward", hanging)
        seen = 0
        async for output in engine.generate(request("a", prompt(1, 20), greedy(20))):
            seen += sum(len(delta.token_ids) for delta in output.deltas)
            if seen == 8:
                go_on.set()
        assert seen == 20
    finally:
        go_on.set()
        engine.close()


async def test_a_paused_engine_runs_no_step_and_loses_nothing(engine):
    expected = [o.deltas[0].token_ids for o in await collect(engine, request("x", prompt(5, 20), greedy(40)))]
    stream = engine.generate(request("a", prompt(5, 20), greedy(40)))
    seen = [(await anext(stream)).deltas[0].token_ids]
    await engine.pause()
    num_generated = (await engine.stats()).num_generated_tokens
    late = asyncio.create_task(collect(engine, request("b", prompt(6, 20))))
    for _ in range(20):
        await engine.check()  # a command, which is worked off between steps
    assert (await engine.stats()).num_generated_tokens == num_generated
    assert not late.done()
    await engine.resume()
    seen += [o.deltas[0].token_ids async for o in stream]
    assert list(chain(*seen)) == list(chain(*expected))
    assert (await late)[-1].finished


async def test_a_paused_engine_can_be_closed(engine):
    await engine.pause()
    stream = asyncio.create_task(collect(engine, request("a", prompt(5, 20))))
    await asyncio.sleep(0)
    await engine.check()
    engine.close()
    assert (await stream)[-1].finished


async def test_requests_of_one_turn_of_the_event_loop_begin_in_one_step(engine, monkeypatch):
    core, plans, schedule = engine.parts.engine, [], Scheduler.schedule
    checked = core.checked

    def slowly(one):
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.01)  # a step that didn't wait for the others would begin meanwhile
        return checked(one)

    def noting(self, **kwargs):
        plan = schedule(self, **kwargs)
        plans.append(len(plan))
        return plan

    monkeypatch.setattr(core, "checked", slowly)
    monkeypatch.setattr(Scheduler, "schedule", noting)
    await asyncio.gather(*(collect(engine, request(f"r{i}", prompt(i, 20))) for i in range(4)))
    assert plans[0] == 4


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_request_can_be_aborted_in_the_turn_in_which_it_came(engine, by_id):
    task = asyncio.create_task(collect(engine, request("a", prompt(1, 20), greedy(200))))
    await asyncio.sleep(0)
    if by_id:
        await engine.abort("a")
        assert (await task)[-1].deltas[0].finish_reason is FinishReason.ABORT
    else:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (await collect(engine, request("a", prompt(1, 20))))[-1].finished
    await engine.check()


async def test_what_is_asked_together_ends_together(engine):
    asked = [request(f"r{i}", prompt(i, 20), greedy(3 + i)) for i in range(3)]
    outputs = await engine.generate_all(asked)
    assert [o.request_id for o in outputs] == ["r0", "r1", "r2"]
    assert [o.num_generated_tokens for o in outputs] == [3, 4, 5]
    with pytest.raises(InvalidRequest):  # the first is queued already
        await engine.generate_all([request("a", prompt(1, 20), greedy(200)), request("b", np.array([10**6]))])
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (await engine.generate_all([request("a", prompt(1, 20))]))[0].finished


async def test_closing_the_stream_aborts(engine):
    stream = engine.generate(request("a", prompt(3, 20), greedy(1500)))
    await anext(stream)
    await stream.aclose()
    for _ in range(200):
        if (await engine.stats()).num_running == 0:
            break
        await asyncio.sleep(0.01)
    assert (await engine.stats()).num_running == 0
    await engine.check()


async def test_abort_by_id_ends_the_stream(engine):
    stream = engine.generate(request("a", prompt(3, 20), greedy(1500)))
    await anext(stream)
    await engine.abort("a")
    await engine.abort("unknown")
    outputs = [output async for output in stream]
    assert outputs[-1].finished
    assert outputs[-1].deltas[0].finish_reason is FinishReason.ABORT


async def test_stop_strings_reach_the_step_loop(processors, engine):
    full = "".join(
        d.text for o in await collect(engine, request("a", prompt(4, 9), greedy(30))) for d in o.deltas
    )
    stop = full[6:9]
    outputs = await collect(engine, request("b", prompt(4, 9), greedy(1500, stop=(stop,))))
    assert "".join(d.text for o in outputs for d in o.deltas) == full[: full.index(stop)]
    assert outputs[-1].deltas[0].stop_reason == stop
    while (await engine.stats()).num_running:
        await asyncio.sleep(0.01)
    assert [one.num_open for one in processors] == [0]
    await engine.check()


async def test_bad_requests_fail_before_the_first_output(engine):
    with pytest.raises(InvalidRequest, match="empty"):
        await collect(engine, request("a", prompt(1, 0)))
    with pytest.raises(PromptTooLong):
        await collect(engine, request("a", prompt(1, 5000)))
    stream = engine.generate(request("a", prompt(1, 5), greedy(1000)))
    await anext(stream)
    with pytest.raises(InvalidRequest, match="in use"):
        await collect(engine, request("a", prompt(1, 5)))
    await stream.aclose()


async def test_a_full_queue_is_overloaded(engine):
    tasks = [asyncio.create_task(collect(engine, request(f"r{i}", prompt(i, 30)))) for i in range(60)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(r, Overloaded) for r in results)
    for one in results:
        if not isinstance(one, Overloaded):
            assert not isinstance(one, BaseException)
            assert one[-1].finished


def before_each_step(engine, action):
    """Call `action` whenever a step is prepared for the device, in turn or ahead."""
    runner = engine.parts.engine.runner
    for name in ("forward", "prepare"):
        real = getattr(runner, name)
        setattr(runner, name, lambda plan, real=real: (action(), real(plan))[1])


async def test_a_failing_step_fails_its_requests_and_serves_on(engine):
    calls = 0

    def fail_second():
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the device is on fire")

    before_each_step(engine, fail_second)
    outputs = await collect(engine, request("a", prompt(5, 9)))
    assert outputs[-1].deltas[0].finish_reason is FinishReason.ERROR
    assert "on fire" in outputs[-1].error
    assert (await collect(engine, request("b", prompt(5, 9))))[-1].error is None
    await engine.check()


async def test_a_bug_in_the_scheduler_does_not_kill_the_server(engine, monkeypatch):
    schedule, calls = Scheduler.schedule, 0

    def fail_first(scheduler, **options):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError("bug")
        return schedule(scheduler, **options)

    monkeypatch.setattr(Scheduler, "schedule", fail_first)
    outputs = await collect(engine, request("a", prompt(5, 9)))
    assert outputs[-1].error == "ZeroDivisionError: bug"
    assert (await collect(engine, request("b", prompt(5, 9))))[-1].error is None


async def test_the_event_loop_is_not_blocked_by_a_step(engine):
    before_each_step(engine, lambda: time.sleep(0.2))
    task = asyncio.create_task(collect(engine, request("a", prompt(6, 9), greedy(3))))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks > 20


async def test_flush_and_drawing(engine):
    await collect(engine, request("a", prompt(7, 40)))
    assert "block" in await engine.draw_tree()
    assert (await engine.cache_control.flush()).freed_blocks[Tier.DEVICE] == 3
    assert await engine.draw_tree() == "(empty)"
    outputs = await collect(engine, request("b", prompt(7, 40)))
    assert outputs[0].cache.miss_reason == "flushed"


async def test_drain_waits_and_then_aborts(engine):
    short = asyncio.create_task(collect(engine, request("a", prompt(8, 9), greedy(5))))
    await asyncio.sleep(0)
    assert await engine.drain(20.0)
    assert (await short)[-1].deltas[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(ShuttingDown):
        await collect(engine, request("b", prompt(8, 9)))


async def test_drain_aborts_what_takes_too_long(engine):
    long = asyncio.create_task(collect(engine, request("a", prompt(8, 9), greedy(1500))))
    await asyncio.sleep(0.05)
    assert not await engine.drain(0.0)
    assert (await long)[-1].deltas[0].finish_reason is FinishReason.ABORT


async def test_close_ends_open_requests(engine):
    task = asyncio.create_task(collect(engine, request("a", prompt(8, 9), greedy(1500))))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.close)
    assert (await task)[-1].deltas[0].finish_reason is FinishReason.ABORT
    engine.close()
    with pytest.raises(ShuttingDown):
        await engine.stats()


async def test_an_idle_engine_touches_the_blocks_that_come_next_and_answers_at_once(checkpoint, monkeypatch):
    touched: list[int] = []
    real = DeviceKV.touch

    def touch(kv, block_id):
        touched.append(block_id)
        real(kv, block_id)

    monkeypatch.setattr(DeviceKV, "touch", touch)
    engine = AsyncEngine.from_settings(engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16))
    try:
        num_blocks = engine.parts.engine.cache.num_blocks
        first = await collect(engine, request("a", prompt(1, 40)))
        async with asyncio.timeout(30):
            while not touched or touched[-1] < num_blocks - 1:
                await asyncio.sleep(0.01)
        again = await collect(engine, request("b", prompt(1, 40)))
        assert touched == sorted(set(touched))
        answers = [[t for o in one for d in o.deltas for t in d.token_ids] for one in (first, again)]
        assert answers[0] == answers[1]
        await engine.check()
    finally:
        engine.close()


async def test_blocks_that_rest_are_free_although_somebody_asks_for_counts_all_the_time(checkpoint):
    settings = engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16, speculation="off")
    engine = AsyncEngine(lambda supervisor: build_engine(settings, None, supervisor), max_waiting=9)
    try:
        beam = GenerationRequest("a", prompt(1, 40), greedy(1), is_continuation=True)
        async for _ in engine.generate(beam):
            pass
        deadline = time.monotonic() + 30
        while (stats := await engine.stats()).num_free_blocks + stats.num_cached_blocks != stats.num_blocks:
            assert time.monotonic() < deadline
    finally:
        engine.close()


async def test_a_grammar_is_compiled_in_time_though_those_of_another_tenant_wait(checkpoint, monkeypatch):
    """The time limit begins with the work, tenants take turns, and one tenant's queue is bounded."""
    monkeypatch.setattr(async_engine, "GRAMMAR_TIMEOUT_S", 1.5)
    monkeypatch.setattr(async_engine, "MAX_WAITING_GRAMMARS", 16)
    engine = AsyncEngine.from_settings(engine_settings(checkpoint, kv_cache_memory="2MB", block_size=16))
    compile_one = GrammarCompiler.compile
    begun: list[str] = []

    def slow(self, spec, owner=""):
        if threading.current_thread().name == "stemma-grammars":
            begun.append(spec.text)
            time.sleep(0.4 if spec.text.startswith("s") else 0.0)
        return compile_one(self, spec, owner)

    def ask(owner: str, name: str, regex: str) -> asyncio.Task:
        params = SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", regex))
        salted = Namespace(salt=owner, owner=owner)
        one = GenerationRequest(name, prompt(1, 20), params, namespace=salted)
        return asyncio.create_task(collect(engine, one))

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    flood = [ask("ada", f"a{number}", f"s{number}") for number in range(12)]
    while not begun:
        await asyncio.sleep(0.01)
    num_before = len(begun)
    outputs = await ask("bob", "b", "b+")
    assert outputs[-1].finished
    assert begun.index("b+") <= num_before + 4, "two threads, and a turn of either at most while bob asks"
    ended = await asyncio.gather(*flood, return_exceptions=True)
    refused = [one for one in ended if isinstance(one, BaseException)]
    assert all(isinstance(one, RateLimited) for one in refused), refused
    assert 1 <= len(refused) <= 4
    engine.close()


async def test_a_session_reaches_the_policy_as_a_number(engine, monkeypatch):
    """One session has one number, and several answers to one prompt have none."""
    told: list[int] = []
    insert = HazardPolicy.insert

    def noted(policy, block_ids, now, traits):
        told.append(traits.session)
        insert(policy, block_ids, now, traits)

    monkeypatch.setattr(HazardPolicy, "insert", noted)
    found: dict[tuple[str, int], set[int]] = {}
    for seed, (name, n) in enumerate((("mine", 1), ("mine", 1), ("yours", 1), ("", 1), ("mine", 2))):
        told.clear()
        one = request("s", prompt(70 + seed, 40))
        await collect(engine, replace(one, session=name, params=replace(one.params, n=n)))
        assert told
        found.setdefault((name, n), set()).update(told)
    assert [len(numbers) for numbers in found.values()] == [1, 1, 1, 1]
    assert found["", 1] == found["mine", 2] == {0}
    assert len(found["mine", 1] | found["yours", 1] | {0}) == 3
