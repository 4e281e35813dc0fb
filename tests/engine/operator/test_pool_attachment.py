"""The engine above a pool: shared by engines, split into prefill and decode, and broken in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.harness import Answer, Harness, greedy, prompt
from tests.engine.operator.pool_rounds import (
    PROMPTS,
    TIMEOUT_S,
    Expected,
    Serve,
    expected,
    from_pool,
    pool,
    round_of,
    serve,
)
from tests.memory.tiers.pool.faulty import FaultyBackend

from stemma.config.settings import TierSettings
from stemma.engine.api import CacheReport
from stemma.errors import StorageError
from stemma.memory.tiers.pool.backend import Parts
from stemma.memory.tiers.pool.breaker import Circuit
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.registry import open_pool_backend, read_pool_config
from stemma.memory.tiers.transfer import TierTransfer
from stemma.types import Tier

__all__ = ["expected", "serve"]  # fixtures


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "pool.json"
    file.write_text(json.dumps({"path": str(tmp_path / "pool")}))
    return file


def lower(one: Harness) -> TierTransfer:
    assert one.tiers is not None
    return one.tiers


def break_pool(one: Harness, deadline_s: float = 0.1) -> FaultyBackend:
    """Attach the pool anew, with an adapter that injects faults in front of its backend."""
    healthy, finish = pool(one), lower(one).detach(Tier.POOL)
    assert finish is not None
    finish()
    settings = healthy.settings.model_copy(update={"deadline_s": deadline_s})
    backend = FaultyBackend(open_pool_backend(settings.name, read_pool_config(settings.config)))
    names = PoolKeys(one.key_space.model_fingerprint)
    lower(one).attach(PoolStore(backend, names, healthy.block_bytes, settings), settings.write)
    return backend


def test_what_one_engine_computed_another_takes_from_the_pool(serve: Serve, expected: Expected) -> None:
    one, two = serve(), serve()
    assert from_pool(round_of(one, expected)) == [0] * 4
    assert from_pool(round_of(two, expected)) == [96] * 4
    assert pool(two).counters.reasons["negative_cache"] >= 0


def report_of(answer: Answer) -> CacheReport:
    assert answer.cache is not None
    return answer.cache


def test_nearer_tiers_win(serve: Serve, expected: Expected) -> None:
    one = serve(num_blocks=64)
    round_of(one, expected)
    again = round_of(one, expected)
    assert from_pool(again) == [0] * 4
    assert [report_of(answer).cached_by_tier[Tier.DEVICE] for answer in again] == [99] * 4
    two = serve(tiers=TierSettings(host_cache=64 * 10**6, load_when="always"))
    assert from_pool(round_of(two, expected)) == [96] * 4
    third = round_of(two, expected)
    assert [report_of(answer).num_cached_tokens for answer in third] == [96] * 4
    # A prefetch that came too late the second time may leave a prompt to the pool, but never all.
    assert sum(report_of(answer).cached_by_tier.get(Tier.HOST, 0) for answer in third) >= 96


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 31, 32, 33, 97, 112])
def test_prefill_on_one_engine_decode_on_another(
    serve: Serve, expected: Expected, num_tokens: int, cached: bool
) -> None:
    """The decode side needs no prefix cache of its own."""
    tokens = prompt(num_tokens, num_tokens)
    prefill, decode = serve(role="prefill"), serve(role="decode", enable_prefix_cache=cached)
    first = prefill.serve(tokens, greedy(1)).token_ids[0]
    assert lower(prefill).wait_for_queued(Tier.POOL, TIMEOUT_S)
    answer = decode.serve(tokens, greedy(6))
    assert answer.token_ids[0] == expected(tokens)
    assert first == answer.token_ids[0][:1]
    # Everything but the last token, whose logits are needed, came from the pool.
    assert report_of(answer).cached_by_tier == {Tier.POOL: num_tokens - 1}
    decode.cache.check()
    decode.cache.check()


def test_decode_computes_what_the_prefill_side_never_published(serve: Serve, expected: Expected) -> None:
    decode = serve(role="decode")
    assert from_pool(round_of(decode, expected)) == [0] * 4


def test_decode_goes_on_when_the_tail_is_lost(serve: Serve, expected: Expected, tmp_path: Path) -> None:
    tokens = PROMPTS[0]
    prefill, decode = serve(role="prefill"), serve(role="decode")
    prefill.serve(tokens, greedy(1))
    assert lower(prefill).wait_for_queued(Tier.POOL, TIMEOUT_S)
    backend = break_pool(decode)
    lost: list[int] = []

    def spoil(parts: Parts) -> None:
        lost.append(1)
        if len(lost) == 7:
            parts[0][100] ^= 1

    backend.spoil = spoil
    answer = decode.serve(tokens, greedy(6))
    assert answer.token_ids[0] == expected(tokens)
    assert report_of(answer).cached_by_tier == {Tier.POOL: 96}
    assert pool(decode).counters.reasons["checksum"] == 1


def test_a_pool_that_answers_too_slowly(serve: Serve, expected: Expected) -> None:
    round_of(serve(), expected)
    one = serve()
    backend = break_pool(one)
    backend.gate.clear()  # every call hangs, as Mooncake's do for 4.3 s and a dead NFS mount's for ever
    assert from_pool(round_of(one, expected)) == [0] * 4
    assert pool(one).counters.reasons["late"] > 0
    assert pool(one).status().circuit is not Circuit.CLOSED
    backend.gate.set()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", [0, 20, 64, -1])
def test_a_pool_that_returns_garbage(serve: Serve, expected: Expected, at: int) -> None:
    round_of(serve(), expected)
    one = serve()
    backend = break_pool(one, deadline_s=5.0)

    def flip(parts: Parts) -> None:
        parts[0][at] ^= 0x10

    backend.spoil = flip
    assert from_pool(round_of(one, expected)) == [0] * 4
    reasons = pool(one).counters.reasons
    assert reasons["checksum"] + reasons["bad_header"] > 0
    backend.spoil = None
    assert from_pool(round_of(serve(), expected)) == [96] * 4  # the spoiled values were replaced


def test_a_pool_whose_connection_breaks(serve: Serve, expected: Expected) -> None:
    round_of(serve(), expected)
    one = serve()
    break_pool(one).error = StorageError("connection lost")
    assert from_pool(round_of(one, expected)) == [0] * 4
    assert pool(one).counters.reasons["unreachable"] > 0


def test_a_pool_that_is_full(serve: Serve, expected: Expected) -> None:
    one = serve()
    break_pool(one).full_for = 10**6
    round_of(one, expected)
    assert pool(one).counters.reasons["no_space"] > 0


def test_other_requests_go_on_while_one_waits_for_a_hanging_pool(serve: Serve, expected: Expected) -> None:
    one = serve(num_blocks=64, tiers=TierSettings(load_timeout_s=1000.0, load_when="always"))
    backend = break_pool(one, deadline_s=1000.0)
    first = one.add(PROMPTS[0], greedy(30))
    while not one.answers[first].token_ids:
        one.step()
    backend.gate.clear()
    second = one.add(PROMPTS[1], greedy(6))
    while not one.answers[first].finished:
        one.step()
    assert not one.answers[second].token_ids
    backend.gate.set()
    one.run()
    assert one.answers[second].token_ids[0] == expected(PROMPTS[1])
