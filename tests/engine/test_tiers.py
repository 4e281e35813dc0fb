"""The engine above real tiers: every answer equals the cache-off run, whatever the tiers do."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stemma.config.settings import TierSettings
from stemma.errors import StorageError, StorageLocked
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.types import FinishReason, Tier
from tests.engine.harness import Harness, greedy, prompt
from tests.engine.tier_rounds import (
    BLOCK_SIZE,
    PROMPTS,
    TIMEOUT_S,
    Serve,
    cached,
    disk,
    expected,
    round_of,
    serve,
)
from tests.memory.faulty_files import FaultyFiles

__all__ = ["expected", "serve"]  # fixtures


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def harness(harness: Callable[..., Harness], request: pytest.FixtureRequest) -> Callable[..., Harness]:
    """All of these tests run with steps in turn, and with steps that overlap."""
    return partial(harness, overlaps=request.param)


def break_disk(one: Harness) -> FaultyFiles:
    """Open the directory anew, with files that fail on command."""
    healthy, finish = disk(one), one.tiers.detach(Tier.DISK)
    finish()
    files, root = FaultyFiles(), healthy.path.parent
    block_bytes, policy = healthy.block_bytes, LRUPolicy()
    one.tiers.attach(DiskStore(root, one.key_space, block_bytes, 10_000_000, policy, time.time, files=files))
    return files


def test_a_working_set_larger_than_the_device_is_served_from_the_host(serve, expected) -> None:
    one = serve(host_cache="64MB")
    assert cached(round_of(one, expected), Tier.HOST) == [0] * 5
    assert cached(round_of(one, expected), Tier.HOST) == [96] * 5


def test_a_working_set_of_device_and_host_together_is_served(serve, expected) -> None:
    """Thirty blocks in turn: the host alone, with room for 26, would lose each right before its next use."""
    block_bytes = serve(host_cache="64MB").cache.below.stores[0].block_bytes
    one = serve(host_cache=26 * block_bytes)
    for _ in range(2):
        round_of(one, expected)
    answers = round_of(one, expected)
    assert [answer.cache.num_cached_tokens for answer in answers] == [96] * 5
    assert one.cache.below.stores[0].num_blocks <= 26


@pytest.mark.one_in(3)
@pytest.mark.parametrize("host_write", ["write_back", "write_through", "write_through_selective"])
@pytest.mark.parametrize("host_exclusive", [False, True])
def test_every_policy_gives_the_same_answers(serve, expected, host_write, host_exclusive, tmp_path) -> None:
    one = serve(
        host_cache="200kB",
        host_write=host_write,
        host_exclusive=host_exclusive,
        disk_cache=tmp_path,
        disk_cache_size="10MB",
        disk_write="write_back",
    )
    for _ in range(3):
        round_of(one, expected)


def test_a_restart_is_warm(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    round_of(one, expected)
    one.engine.close()
    two = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    assert cached(round_of(two, expected), Tier.DISK) == [96] * 5


def test_a_kill_leaves_what_was_written(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path / "killed", disk_cache_size="10MB")
    round_of(one, expected)
    shutil.copytree(tmp_path / "killed", tmp_path / "left")  # the files as they are, and no lock
    two = serve(disk_cache=tmp_path / "left", disk_cache_size="10MB")
    assert cached(round_of(two, expected), Tier.DISK) == [96] * 5


def test_a_second_engine_on_the_directory_is_refused(serve, tmp_path) -> None:
    serve(disk_cache=tmp_path, disk_cache_size="10MB")
    with pytest.raises(StorageLocked):
        serve(disk_cache=tmp_path, disk_cache_size="10MB")


def damage(path: Path, offset: int) -> None:
    for slab in path.glob("slab-*"):
        content = bytearray(slab.read_bytes())
        content[offset::4096] = bytes(byte ^ 1 for byte in content[offset::4096])
        slab.write_bytes(content)


def test_flipped_bits_cost_time_not_truth(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    round_of(one, expected)
    damage(disk(one).path, 777)
    round_of(one, expected)
    assert disk(one).counters.reasons["checksum"] > 0
    assert cached(round_of(one, expected), Tier.DISK) == [96] * 5


def test_a_truncated_slab_costs_time_not_truth(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    round_of(one, expected)
    for slab in disk(one).path.glob("slab-*"):
        slab.write_bytes(slab.read_bytes()[:20_000])
    round_of(one, expected)
    assert disk(one).counters.reasons["truncated"] > 0
    assert cached(round_of(one, expected), Tier.DISK) == [96] * 5


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing(serve, expected, tmp_path, number) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    files = break_disk(one)
    files.write_errno = number
    round_of(one, expected)
    round_of(one, expected)
    assert sum(disk(one).counters.reasons.values()) > 0
    assert disk(one).num_blocks == 0


def test_a_disk_that_reads_nothing(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    round_of(one, expected)
    files = break_disk(one)
    files.read_errno = errno.EIO
    round_of(one, expected)
    assert disk(one).counters.reasons["eio"] > 0


def test_load_failure_fail_ends_the_request_with_the_reason(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB", load_failure="fail")
    round_of(one, expected)
    damage(disk(one).path, 777)
    request_id = one.add(PROMPTS[0], greedy(4))
    one.run()
    answer = one.answers[request_id]
    assert answer.finish[0] is FinishReason.ERROR
    assert answer.error is not None
    assert "disk" in answer.error
    # The damaged block is gone, so the next attempt computes it.
    while one.serve(PROMPTS[0], greedy(4)).error is not None:
        pass
    assert one.serve(PROMPTS[0], greedy(4)).token_ids[0] == expected(PROMPTS[0])


def slow_disk(serve: Serve, expected, tmp_path: Path, delay_s: float, **tiers: object) -> Harness:
    """Return an engine whose prompts lie on a disk that takes `delay_s` for every read."""
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB", **tiers)
    round_of(one, expected)
    break_disk(one).read_delay_s = delay_s
    return one


def test_best_effort_does_not_wait_for_the_disk(serve, expected, tmp_path) -> None:
    one = slow_disk(serve, expected, tmp_path, 60.0, prefetch="best_effort")
    answer = one.serve(PROMPTS[0], greedy(4))
    assert answer.token_ids[0] == expected(PROMPTS[0])
    assert answer.cache.num_cached_tokens == 0
    assert one.cache.below.stats().loads.num_late_loads == 0


def test_a_late_load_is_given_up_and_computed(serve, expected, tmp_path) -> None:
    one = slow_disk(serve, expected, tmp_path, 0.5, prefetch="timeout", load_timeout_s=0.05)
    answer = one.serve(PROMPTS[0], greedy(4))
    assert answer.token_ids[0] == expected(PROMPTS[0])
    assert answer.cache.cached_by_tier == {}
    assert one.cache.below.stats().loads.num_late_loads == 1


def test_a_late_load_may_fail_its_request(serve, expected, tmp_path) -> None:
    one = slow_disk(serve, expected, tmp_path, 0.5, load_timeout_s=0.05, load_failure="fail")
    answer = one.serve(PROMPTS[0], greedy(4))
    assert answer.finish[0] is FinishReason.ERROR
    assert answer.error is not None
    assert "too long" in answer.error
    assert one.cache.below.stats().loads.num_late_loads == 1


def test_wait_complete_waits_beyond_the_time_limit(serve, expected, tmp_path) -> None:
    one = slow_disk(serve, expected, tmp_path, 0.2, prefetch="wait_complete", load_timeout_s=0.01)
    answer = one.serve(PROMPTS[0], greedy(4))
    assert answer.token_ids[0] == expected(PROMPTS[0])
    assert answer.cache.cached_by_tier == {Tier.DISK: 96}
    assert one.cache.below.stats().loads.num_late_loads == 0


def test_a_tier_slower_than_computing_is_left_alone(
    harness: Callable[..., Harness], expected, tmp_path
) -> None:
    tiers = TierSettings(load_when="faster", disk_cache=tmp_path, disk_cache_size="10MB")
    one = harness(num_blocks=12, block_size=BLOCK_SIZE, tiers=tiers)
    round_of(one, expected)
    for _ in range(20):
        one.tiers.estimator.observe_load(Tier.DISK, 1, 10.0)
    assert cached(round_of(one, expected), Tier.DISK) == [0] * 5
    stats = one.cache.below.stats()
    assert not stats.tiers[Tier.DISK].is_worth_loading
    assert stats.compute_s_per_block is not None
    assert stats.tiers[Tier.DISK].load_s_per_block > stats.compute_s_per_block
    one.engine.close()


def test_two_requests_with_one_prefix_load_it_once(serve, expected, tmp_path) -> None:
    one = serve(host_cache="64MB")
    round_of(one, expected)
    first, second = (one.add(PROMPTS[0], greedy(4)) for _ in range(2))
    one.run()
    assert one.answers[first].token_ids[0] == one.answers[second].token_ids[0] == expected(PROMPTS[0])
    assert one.cache.below.stats().loads.loaded_blocks[Tier.HOST] == 6


def test_blocks_come_nearer_while_a_request_waits_for_its_turn(serve, expected, tmp_path) -> None:
    one = serve(disk_cache=tmp_path, disk_cache_size="10MB")
    round_of(one, expected)
    one.engine.close()
    two = serve(max_num_seqs=1, host_cache="1MB", disk_cache=tmp_path, disk_cache_size="10MB")
    two.add(prompt(99, 20), greedy(60))
    two.step()
    waiting = two.add(PROMPTS[1], greedy(4))
    two.step()
    deadline = time.monotonic() + TIMEOUT_S
    while two.cache.below.stats().loads.prefetched_blocks[Tier.DISK] < 6 and time.monotonic() < deadline:
        time.sleep(0.002)
    two.run()
    answer = two.answers[waiting]
    assert answer.token_ids[0] == expected(PROMPTS[1])
    assert answer.cache.cached_by_tier == {Tier.DISK: 96}
    assert two.cache.below.stats().loads.loaded_blocks == {Tier.HOST: 6}


def test_an_aborted_load_leaks_nothing(serve, expected) -> None:
    one = serve(host_cache="64MB")
    round_of(one, expected)
    for _ in range(5):
        request_id = one.add(PROMPTS[0], greedy(4))
        one.step()
        one.abort(request_id)
        one.run()
    round_of(one, expected)


def test_an_unusable_directory_is_refused_at_the_start(serve, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        serve(disk_cache=tmp_path / "file")
