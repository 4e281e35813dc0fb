"""The queue between the engine and one reader."""

from __future__ import annotations

import asyncio

from stemma.engine.mailbox import Mailbox


def test_items_come_in_order_whenever_they_are_put() -> None:
    async def run() -> list[int]:
        box = Mailbox[int](asyncio.get_running_loop())
        box.put(0)
        reader = asyncio.create_task(_take(box, 4))
        for item in (1, 2):
            box.put(item)
        await asyncio.sleep(0)  # the reader has taken all and waits
        box.put(3)
        return await reader

    assert asyncio.run(run()) == [0, 1, 2, 3]


def test_a_cancelled_reader_loses_nothing() -> None:
    async def run() -> list[int]:
        box = Mailbox[int](asyncio.get_running_loop())
        reader = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(1)  # wakes the reader, which is cancelled before it runs
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        box.put(2)
        return await _take(box, 2)

    assert asyncio.run(run()) == [1, 2]


async def _take(box: Mailbox[int], count: int) -> list[int]:
    return [await box.get() for _ in range(count)]
