"""What a server tells of itself is believed only as far as it can be true."""

from __future__ import annotations

import orjson
import pytest

from stemma.told import MOST_TOLD_BYTES, NOTHING, Told, ToldLoad, ToldModel, read_told
from stemma_router.cluster.routers import CacheAware, ReplicaLoad, RoutedRequest

ASK = RoutedRequest(list(range(10)), 165, 16)


def test_what_is_told_is_read_back() -> None:
    told = Told(
        decode_s_per_token=0.02,
        load=ToldLoad(seats=4, running=3, waiting=1, kv_in_use=0.5, seat_s=2.0, row_s=0.001),
        serves=ToldModel(block_size=16, model="a", kv="b", adapters=((2**64 - 1, 7),)),
    )
    assert read_told(orjson.dumps({"status": "ok", **told.as_json()})) == told


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ok",
        b"[]",
        b'{"load": 5}',
        b'{"load": {"seats": 0}}',
        b'{"load": {"seats": 4, "running": -1}}',
        b'{"load": {"seats": 4, "kv_in_use": 2.0}}',
        b'{"load": {"seats": 4, "seat_s": 1e999}}',
        b'{"decode_s_per_token": -1}',
        b'{"serves": {"block_size": 16, "model": 5, "kv": ""}}',
        b'{"x": "' + b"y" * MOST_TOLD_BYTES + b'"}',
    ],
)
def test_what_cannot_be_true_is_not_believed(content: bytes) -> None:
    assert read_told(content) == NOTHING


def loaded(num_requests: int, **fields) -> ReplicaLoad:
    told = ToldLoad(**({"seats": 4, "prefill_s_per_token": 1e-4, "seat_s": 2.0} | fields))
    return ReplicaLoad(num_requests=num_requests, num_running=num_requests, told=told)


def test_a_prefix_whose_home_has_no_seat_free_gets_a_second_home() -> None:
    assert CacheAware().order(ASK, [loaded(0), loaded(3)], [0, 10])[0] == 1
    assert CacheAware().order(ASK, [loaded(0), loaded(4)], [0, 10])[0] == 0
    assert CacheAware().order(ASK, [loaded(0), loaded(4, seats=64)], [0, 10])[0] == 1
    full = loaded(2, running=2, waiting=1, kv_in_use=0.95)
    assert CacheAware().order(ASK, [loaded(0), full], [0, 10])[0] == 0  # its KV has no room for a third


def test_answers_that_slow_each_other_are_spread() -> None:
    slowed = {"seats": 64, "row_s": 0.01, "answer_tokens": 100.0}
    assert CacheAware().order(ASK, [loaded(0, **slowed), loaded(3, **slowed)], [0, 10])[0] == 0
    short = RoutedRequest(list(range(10)), 165, 16, max_output=1)
    assert CacheAware().order(short, [loaded(0, **slowed), loaded(3, **slowed)], [0, 10])[0] == 1


def test_requests_that_others_sent_count_too() -> None:
    load = ReplicaLoad(num_requests=2)
    load.note_told(ToldLoad(seats=4, running=4, waiting=3))
    assert (load.num_elsewhere, load.num_there) == (5, 7)
    load.num_requests = 0
    assert load.num_there == 5
    load.note_told(ToldLoad(seats=4))
    assert load.num_there == 0


def test_small_differences_of_speed_do_not_choose_the_home_of_a_new_prefix() -> None:
    homes = [
        CacheAware().order(RoutedRequest([n], 500, 16), [loaded(0), loaded(0)], [0, 0])[0] for n in range(50)
    ]
    uneven = [loaded(0), loaded(0, prefill_s_per_token=1.5e-4)]
    assert [CacheAware().order(RoutedRequest([n], 500, 16), uneven, [0, 0])[0] for n in range(50)] == homes
    crawling = [loaded(0), loaded(0, prefill_s_per_token=1e-3)]
    assert {CacheAware().order(RoutedRequest([n], 500, 16), crawling, [0, 0])[0] for n in range(50)} == {0}
