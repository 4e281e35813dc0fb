"""Requests that can't get blocks: beside pins they fail with a typed error, and the others are served."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt

from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings
from stemma.engine.operator.cache_answers import Pin
from stemma.errors import GenerationFailed, InvalidRequest, PromptTooLong
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import FinishReason, Tier

BLOCK_SIZE = 16


@pytest.fixture
def engine(checkpoint, model):
    block_bytes = model.layout(BLOCK_SIZE).block_bytes
    settings = engine_settings(checkpoint, kv_cache_memory=64 * block_bytes, block_size=BLOCK_SIZE)
    engine = AsyncEngine.from_settings(settings)
    yield engine
    engine.close()


async def pin(engine: AsyncEngine, num_blocks: int):
    tokens = prompt(1, num_blocks * BLOCK_SIZE)
    await collect(engine, request("pinned", tokens, greedy(1)))
    return tokens, await engine.cache_control.pin(DEFAULT_NAMESPACE, tokens)


async def test_a_prompt_that_does_not_fit_beside_pins_is_refused_and_others_are_served(engine):
    pinned, _ = await pin(engine, 32)
    long = asyncio.create_task(collect(engine, request("long", prompt(2, 560))))
    short = [asyncio.create_task(collect(engine, request(f"s{i}", prompt(3 + i, 20)))) for i in range(3)]
    async with asyncio.timeout(20):
        with pytest.raises(PromptTooLong, match="pinned prefixes, which leave room for 512; unpin"):
            (await long)[-1].raise_error()
        assert [one[-1].error for one in await asyncio.gather(*short)] == [None] * 3
    # With the pinned prefix as its own it does fit.
    outputs = await collect(engine, request("extends", np.concatenate([pinned, prompt(9, 200)])))
    assert outputs[-1].error is None
    assert outputs[-1].cache.num_cached_tokens == 512
    await engine.check()


async def test_an_answer_that_outgrows_what_pins_leave_fails(engine):
    await pin(engine, 32)
    async with asyncio.timeout(60):
        outputs = await collect(engine, request("a", prompt(2, 400), greedy(300)))
        assert outputs[-1].deltas[0].finish_reason is FinishReason.ERROR
        with pytest.raises(GenerationFailed, match="beside the pinned prefixes"):
            outputs[-1].raise_error()
        assert (await collect(engine, request("b", prompt(3, 20))))[-1].error is None
    await engine.check()


class GatedFile(io.BytesIO):
    """Takes what is written only once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.gate = threading.Event(), threading.Event()

    def write(self, data) -> int:
        self.is_reached.set()
        assert self.gate.wait(60)
        return super().write(data)


async def test_a_prompt_waits_while_a_command_holds_blocks(engine):
    """An export, unlike a pin, ends: what doesn't fit beside it waits."""
    file = GatedFile()
    tokens = prompt(1, 40 * BLOCK_SIZE)
    await collect(engine, request("held", tokens, greedy(1)))
    export = asyncio.create_task(engine.cache_control.export(DEFAULT_NAMESPACE, tokens, file))
    assert await asyncio.to_thread(file.is_reached.wait, 20)
    long = asyncio.create_task(collect(engine, request("long", prompt(2, 560))))
    await asyncio.sleep(0.3)
    assert not long.done()
    file.gate.set()
    assert await export == 40
    assert (await long)[-1].error is None


async def test_a_command_whose_client_left_gives_its_blocks_up(engine, tmp_path):
    tokens = prompt(1, 20 * BLOCK_SIZE)
    await collect(engine, request("a", tokens, greedy(1)))
    for delay in (0, 0, 0.001, 0.002, 0.005):
        with (tmp_path / "bundle").open("wb") as file:
            task = asyncio.create_task(engine.cache_control.export(DEFAULT_NAMESPACE, tokens, file))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    pinning = asyncio.create_task(engine.cache_control.pin(DEFAULT_NAMESPACE, tokens))
    await asyncio.sleep(0)
    pinning.cancel()
    await asyncio.gather(pinning, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert not engine.cache_control.pins()
    assert (await engine.cache_control.flush()).freed_blocks[Tier.DEVICE] == 20
    stats = await engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


async def test_pins_that_are_being_made_count(engine):
    """Three at once that may not stand together: one is refused, whatever the order."""
    parts = [prompt(n, 14 * BLOCK_SIZE) for n in range(3)]
    for n, tokens in enumerate(parts):
        await collect(engine, request(f"r{n}", tokens, greedy(1)))
    control = engine.cache_control
    pins = [asyncio.create_task(control.pin(DEFAULT_NAMESPACE, tokens)) for tokens in parts]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(0.2)  # all are made between steps before this thread learns of any
    made = await asyncio.gather(*pins, return_exceptions=True)
    assert [type(one) for one in made].count(InvalidRequest) == 1
    for one in made:
        if not isinstance(one, InvalidRequest):
            assert isinstance(one, Pin)
            await control.unpin(one.pin_id)
    await control.pin(DEFAULT_NAMESPACE, parts[0])
    await control.pin(DEFAULT_NAMESPACE, parts[1])
    await engine.check()


async def test_a_cancelled_pin_is_no_pin(engine, monkeypatch):
    """Also where the call is cancelled while it pins in lower tiers, with blocks of the device pinned."""
    tokens = prompt(1, 20 * BLOCK_SIZE)
    await collect(engine, request("a", tokens, greedy(1)))
    began, may_end = threading.Event(), threading.Event()

    def slowly(keys):
        began.set()
        may_end.wait(10)
        return {}

    monkeypatch.setattr(engine.parts.engine.cache.below, "pin", slowly)
    pinning = asyncio.create_task(engine.cache_control.pin(DEFAULT_NAMESPACE, tokens))
    await asyncio.to_thread(began.wait, 10)
    pinning.cancel()
    await asyncio.gather(pinning, return_exceptions=True)
    may_end.set()
    assert engine.cache_control.pins() == []
    await asyncio.sleep(0.05)
    assert (await engine.cache_control.flush()).freed_blocks[Tier.DEVICE] == 20


async def test_a_pin_that_expires_while_it_is_unpinned_logs_nothing(engine):
    problems, control, loop = [], engine.cache_control, asyncio.get_running_loop()
    tokens, made = await pin(engine, 4)
    expiring = await control.pin(DEFAULT_NAMESPACE, tokens, ttl_s=0.2)
    loop.set_exception_handler(lambda _, context: problems.append(context["message"]))

    def unpin() -> None:
        """Call `unpin` up to where it first waits; its caller leaves then."""
        call = control.unpin(expiring.pin_id)
        with suppress(InvalidRequest):
            call.send(None)
        call.close()

    loop.call_later(0.21, unpin)
    time.sleep(0.3)  # both timers are due in one turn of the loop, the pin's own first
    await asyncio.sleep(0.1)
    gc.collect()
    assert problems == []
    assert [one.pin_id for one in control.pins()] == [made.pin_id]
    await control.unpin(made.pin_id)
    assert (await engine.cache_control.flush()).freed_blocks[Tier.DEVICE] == 4
