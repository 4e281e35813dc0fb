"""No thread of the engine dies in silence: requests and calls end with an error, and the reason is kept."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from stemma.engine import trace_log
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.build import build_engine
from stemma.engine.core.engine import Engine
from stemma.engine.core.scheduler import Scheduler
from stemma.engine.llm import LLM, engine_settings
from stemma.engine.output.output import OutputProcessor
from stemma.engine.step_thread import StepThread
from stemma.errors import EngineFailed, IntegrityError, ShuttingDown
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.loads import Load
from stemma.types import FinishReason
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt

CACHE = {"kv_cache_memory": "2MB", "block_size": 16}


@pytest.fixture
def start(checkpoint, tmp_path):
    """Return a maker of engines that are closed at the end; `supervisors` collects theirs."""
    engines = []

    def make(supervisors: list | None = None, **fields) -> AsyncEngine:
        settings = engine_settings(checkpoint, **CACHE, **fields)

        def build(supervisor):
            if supervisors is not None:
                supervisors.append(supervisor)
            return build_engine(settings, supervisor=supervisor)

        engines.append(AsyncEngine(build, max_waiting=100))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()  # never hangs


def kill_steps(monkeypatch):
    def die(self):
        raise SystemExit("out of luck")

    monkeypatch.setattr(Engine, "step", die)


def kill_steps_inconsistently(monkeypatch):
    """A step fails, and the books don't balance afterwards."""

    def step(self):
        raise ZeroDivisionError("bug")

    def check(self):
        raise IntegrityError("reference counts are wrong")

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(Engine, "check", check)


def kill_outputs(monkeypatch):
    def die(self, news):
        raise RecursionError("bug")

    monkeypatch.setattr(OutputProcessor, "process", die)


def kill_trace(monkeypatch):
    def die(line):
        raise OverflowError("bug")

    monkeypatch.setattr(trace_log, "orjson", SimpleNamespace(dumps=die))


@pytest.mark.parametrize(
    ("thread", "kill"),
    [
        ("stemma-steps", kill_steps),
        ("stemma-steps", kill_steps_inconsistently),
        ("stemma-outputs", kill_outputs),
        ("stemma-trace", kill_trace),
    ],
)
async def test_a_dead_thread_fails_requests_calls_and_the_engine(
    start, monkeypatch, tmp_path, caplog, thread, kill
):
    engine = start(record_trace=tmp_path / "trace.jsonl")
    await collect(engine, request("a", prompt(1, 20)))
    assert engine.failure is None
    kill(monkeypatch)
    tasks = [asyncio.create_task(collect(engine, request(f"r{i}", prompt(2 + i, 20)))) for i in range(4)]
    async with asyncio.timeout(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
        while engine.failure is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the supervisor's own thread ends what is open
    if thread != "stemma-trace":  # a trace is written after the request
        assert all(isinstance(one, EngineFailed) for one in results)
    assert f"thread {thread} failed" in engine.failure
    assert "Traceback" in caplog.text
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailed, match=thread):
            await collect(engine, request("b", prompt(9, 20)))
        with pytest.raises(EngineFailed, match=thread):
            await engine.stats()
        await engine.drain(10.0)


def kill_disk_writes(monkeypatch):
    def die(self, blocks):
        raise SystemExit("out of luck")

    monkeypatch.setattr(DiskStore, "put_many", die)


def kill_disk_reads(monkeypatch):
    def die(self, *_):
        raise SystemExit("out of luck")

    monkeypatch.setattr(DiskStore, "fetch_many", die)


def kill_load_limits(monkeypatch):
    finish = Load.finish

    def die(self, num_done, **options):
        if threading.current_thread().name == "stemma-load-limit":
            raise SystemExit("out of luck")
        return finish(self, num_done, **options)

    monkeypatch.setattr(Load, "finish", die)


@pytest.mark.parametrize(
    ("thread", "kill"),
    [
        ("stemma-write-disk", kill_disk_writes),
        ("stemma-load-", kill_disk_reads),
        ("stemma-load-limit", kill_load_limits),
    ],
)
async def test_a_dead_thread_of_the_tiers_fails_requests_and_the_engine(
    start, monkeypatch, tmp_path, caplog, thread, kill
):
    disk = {"disk_cache": tmp_path / "disk", "disk_cache_size": "10MB", "load_when": "always"}
    disk["load_timeout_s"] = 0.05  # loads are looked at when that is over
    first = start(**disk)
    await collect(first, request("a", prompt(1, 100)))
    await asyncio.to_thread(first.close)  # its blocks are on disk now
    engine = start(**disk)
    kill(monkeypatch)
    tasks = [
        asyncio.create_task(collect(engine, request(f"r{i}", prompt(1 + i, 100), greedy(1500))))
        for i in range(4)
    ]
    async with asyncio.timeout(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, EngineFailed) for one in results)
    assert f"thread {thread}" in engine.failure
    assert "out of luck" in engine.failure
    assert "Traceback" in caplog.text
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailed, match=thread):
            await collect(engine, request("b", prompt(9, 20)))
        await asyncio.to_thread(engine.close)


@pytest.mark.parametrize("name", ["stemma-write-disk", "stemma-load-0", "stemma-pool"])
async def test_what_a_tier_thread_reports_ends_the_engine(start, caplog, name):
    supervisors: list[Any] = []
    engine = start(supervisors)
    long = asyncio.create_task(collect(engine, request("a", prompt(1, 20), greedy(1500))))
    await asyncio.sleep(0.1)
    with caplog.at_level(logging.CRITICAL):
        supervisors[0].on_thread_failure(name, OverflowError("cannot convert float infinity to integer"))
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailed, match=f"thread {name} failed: OverflowError: cannot convert"):
            await long
        await asyncio.to_thread(engine.close)
    assert name in caplog.text


async def test_the_first_failure_is_the_reason(start):
    supervisors: list[Any] = []
    engine = start(supervisors)
    for number in range(3):
        supervisors[0].on_thread_failure(f"thread-{number}", ValueError("x"))
    assert engine.failure == "thread thread-0 failed: ValueError: x"


async def test_a_command_that_fails_tells_its_caller_and_the_engine_serves_on(start, monkeypatch):
    def draw(self, *_):
        raise OverflowError("bug")

    engine = start()
    monkeypatch.setattr(Engine, "draw_tree", draw)
    with pytest.raises(OverflowError):
        await engine.draw_tree()
    assert (await collect(engine, request("a", prompt(1, 20))))[-1].error is None
    assert engine.failure is None


async def test_a_request_that_cannot_be_queued_for_a_bug_fails_alone(start, monkeypatch):
    add = Scheduler.add

    def fail_on_short(self, sequence):
        if sequence.num_tokens == 5:
            raise ZeroDivisionError("bug")
        add(self, sequence)

    engine = start()
    monkeypatch.setattr(Scheduler, "add", fail_on_short)
    good = asyncio.create_task(collect(engine, request("a", prompt(1, 20))))
    with pytest.raises(Exception, match="ZeroDivisionError: bug"):
        await collect(engine, request("b", prompt(1, 5)))
    assert (await good)[-1].error is None
    assert engine.failure is None


async def test_calls_whose_callers_left_do_not_stop_the_steps(start, monkeypatch):
    """A client that leaves while its call waits cancels it; the step thread must not trip over that."""
    engine = start()
    gate = threading.Event()
    monkeypatch.setattr(Engine, "draw_tree", lambda self, *_: gate.wait())
    blocked = asyncio.create_task(engine.draw_tree())
    await asyncio.sleep(0.05)
    left = [asyncio.create_task(engine.stats()) for _ in range(3)]
    await asyncio.sleep(0.05)
    for one in [*left, blocked]:
        one.cancel()
    await asyncio.gather(*left, blocked, return_exceptions=True)
    gate.set()
    assert (await engine.stats()).num_running == 0
    assert engine.failure is None


async def test_text_that_cannot_be_made_fails_its_request_alone(start, monkeypatch):
    engine = start()
    decode = engine.tokenizer.decode
    poison = (await collect(engine, request("a", prompt(1, 20))))[0].deltas[0].token_ids[0]

    def fail(token_ids, **options):
        if poison in list(token_ids):
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "bug")
        return decode(token_ids, **options)

    monkeypatch.setattr(engine.tokenizer, "token_bytes", None)  # so that windows are decoded
    monkeypatch.setattr(engine.tokenizer, "decode", fail)
    poisoned = collect(engine, request("b", prompt(1, 20), greedy(1500)))
    bad, good = await asyncio.gather(poisoned, collect(engine, request("c", prompt(2, 30))))
    assert "UnicodeDecodeError" in bad[-1].error
    assert bad[-1].deltas[0].finish_reason is FinishReason.ERROR
    assert good[-1].error is None
    while (await engine.stats()).num_running:
        await asyncio.sleep(0.01)
    await engine.check()


async def test_requests_behind_the_close_are_refused(start):
    engine = start()
    requests = [request(f"r{i}", prompt(i, 20), greedy(500)) for i in range(8)]
    tasks = [asyncio.create_task(collect(engine, one)) for one in requests]
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    await closing
    for one in results:
        if not isinstance(one, ShuttingDown):
            assert not isinstance(one, BaseException)
            assert one[-1].deltas[0].finish_reason is FinishReason.ABORT


def test_a_failed_load_raises_and_leaves_no_thread(checkpoint):
    before = set(threading.enumerate())

    def build(supervisor):
        raise MemoryError("too little")

    with pytest.raises(MemoryError):
        AsyncEngine(build, max_waiting=1)
    assert not [t for t in set(threading.enumerate()) - before if t.is_alive()]


def test_fail_all_ends_what_can_be_ended(harness, monkeypatch):
    """A request whose blocks can't be freed is reported all the same, and so are those behind it."""
    engine = harness()
    names = [engine.add(prompt(i, 20), greedy(50)) for i in range(3)]
    engine.step()
    free, calls = engine.cache.free, []

    def fail_once(lease, num_computed):
        calls.append(lease)
        if len(calls) == 1:
            raise ZeroDivisionError("bug")
        free(lease, num_computed)

    monkeypatch.setattr(engine.cache, "free", fail_once)
    news = engine.engine.fail_all("the end")
    assert {one.state.request.request_id for one in news} == set(names)
    assert all(one.finish_reason is FinishReason.ERROR for one in news)


def test_the_offline_api_raises_when_a_thread_failed(checkpoint, tmp_path, monkeypatch):
    llm = LLM(checkpoint, record_trace=tmp_path / "trace.jsonl", **CACHE)
    trace = next(thread for thread in threading.enumerate() if thread.name == "stemma-trace")
    kill_trace(monkeypatch)
    llm.generate([[5, 6, 7]], greedy(2))
    trace.join(20)
    with pytest.raises(EngineFailed, match="stemma-trace"):
        llm.generate([[5, 6, 7]], greedy(2))
    llm.close()


class TestStepThread:
    def test_runs_on_one_thread_and_passes_errors_on(self):
        thread = StepThread()
        first, second = thread.call(threading.get_ident), thread.call(threading.get_ident)
        assert first == second != threading.get_ident()
        assert thread.call(lambda: thread.call(threading.get_ident)) == first
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 // 0)
        thread.close()
        thread.close()

    def test_an_interrupted_caller_waits_for_the_work_to_end(self):
        thread = StepThread()
        ended = []
        main = threading.main_thread().ident
        assert main is not None

        def work():
            for _ in range(10):
                # The first may come just before the main thread begins to wait, which then doesn't see it.
                signal.pthread_kill(main, signal.SIGINT)
                deadline = time.monotonic() + 2
                while not thread.is_interrupted and time.monotonic() < deadline:
                    time.sleep(0.01)
                if thread.is_interrupted:
                    break
            ended.append(thread.is_interrupted)

        # A shell starts its background jobs with SIGINT ignored, and Python keeps it so.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                thread.call(work)
        finally:
            signal.signal(signal.SIGINT, before)
        assert ended == [True]
        assert not thread.call(lambda: thread.is_interrupted)

    def test_ends_with_its_owner(self):
        thread = StepThread()
        worker = thread.call(threading.current_thread)
        del thread
        worker.join(10)
        assert not worker.is_alive()
