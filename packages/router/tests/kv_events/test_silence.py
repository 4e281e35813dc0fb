"""Silence isn't "nothing new": machines that vanish, wrong addresses, and what is forgotten with time."""

from __future__ import annotations

import asyncio
import logging

import pytest

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

from packages.router.tests.kv_events.publishing import (
    Following,
    Wire,
    held,
    start,
    stored,
)

from stemma_router.events import subscriber


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(subscriber, "HEARTBEAT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(subscriber, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(subscriber, "UNREACHED_S", 0.1)
    monkeypatch.setattr(subscriber, "STALE_S", 0.4)


async def test_a_server_whose_machine_vanished_and_came_back_is_followed_again() -> None:
    publisher = start()
    async with (
        Wire(publisher.endpoint) as wire,
        Following(wire.endpoint, publisher.replay_endpoint) as following,
    ):
        publisher.put(stored(1))
        await following.sees([1], range(9))
        wire.go_dead()  # no reset, no end: as seen from here, it just says nothing
        publisher.put(stored(2))
        await following.sees([1, 2], range(9))
    publisher.close()


async def test_what_a_server_held_that_cannot_be_reached_is_forgotten_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = start()
    async with Following(publisher.endpoint, publisher.replay_endpoint) as following:
        publisher.put(stored(1))
        await following.sees([1], range(9))
        assert following.subscription.is_connected
        publisher.close()
        await following.sees([], range(9))
        assert not following.subscription.is_connected
        assert following.subscription.num_aged == 1
    assert "is the address right" in caplog.text


async def test_an_address_where_no_events_come_from_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Whether nobody listens there, or something else does."""
    caplog.set_level(logging.WARNING)
    publisher = start()
    assert publisher.replay_endpoint is not None
    for wrong in ("tcp://127.0.0.1:1", publisher.replay_endpoint):
        caplog.clear()
        async with Following(wrong, None) as following, asyncio.timeout(20):
            while f"{wrong}: no KV events" not in caplog.text:
                await asyncio.sleep(0.01)
            assert not following.subscription.is_connected
            assert held(following.holdings, range(3)) == []
    publisher.close()


async def test_a_replay_address_that_does_not_answer_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "SNAPSHOT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", 0.2)
    publisher = start()
    async with Following(publisher.endpoint, "tcp://127.0.0.1:1") as following, asyncio.timeout(20):
        while "no answer from the replay address" not in caplog.text:
            await asyncio.sleep(0.01)
        assert following.subscription.replay_answers is False
    publisher.close()
