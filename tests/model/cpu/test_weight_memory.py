"""Memory of packed weights: aligned, zeroed, apart from each other, in few arrays while a model loads."""

from __future__ import annotations

import pytest

from stemma.model.cpu.weight_memory import ARRAY_BYTES, give_back, weight_memory, weights_together
from stemma.native.early_memory import EarlyMemory
from stemma.native.process_memory import resident_bytes
from stemma.supervision import LoggingSupervisor

SIZES = (1, 64, 65, 4096, 3_000_001, 128)


@pytest.mark.parametrize("together", [False, True])
def test_weights_are_aligned_zeroed_and_apart(together: bool) -> None:
    if together:
        with weights_together():
            rooms = [weight_memory(size) for size in SIZES]
    else:
        rooms = [weight_memory(size) for size in SIZES]
    assert [len(room) for room in rooms] == list(SIZES)
    assert all(room.data_ptr() % 64 == 0 and not room.any() for room in rooms)
    for number, room in enumerate(rooms):
        room.fill_(number + 1)
    assert all(bool((room == number + 1).all()) for number, room in enumerate(rooms))


def test_weights_of_one_loading_lie_beside_each_other() -> None:
    with weights_together():
        first, second = weight_memory(100), weight_memory(1000)
    assert second.data_ptr() == first.data_ptr() + 128
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    later = weight_memory(100)
    assert later.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_a_weight_larger_than_an_array_gets_its_own() -> None:
    with weights_together():
        small, large, next_small = weight_memory(64), weight_memory(80 << 20), weight_memory(64)
    assert len(large) == 80 << 20
    assert next_small.data_ptr() == small.data_ptr() + 64


@pytest.mark.parametrize("is_ready", [False, True])
def test_memory_made_ready_early_is_used_first(is_ready: bool) -> None:
    """Of weights smaller and larger than an array; then come arrays of our own."""
    early = EarlyMemory(200 << 20, LoggingSupervisor())
    if is_ready:
        early.wait()
    with weights_together(early):
        rooms = [weight_memory(size << 20) for size in (40, 90, 40, 40, 70, 20)]
        assert early.take() is None
    assert all(room.data_ptr() % 64 == 0 and not room.any() for room in rooms)
    for number, room in enumerate(rooms):
        room.fill_(number + 1)
    assert all(bool((room == number + 1).all()) for number, room in enumerate(rooms))
    shared = [room.untyped_storage().data_ptr() for room in rooms]
    assert [shared.count(one) for one in shared] == [4, 4, 4, 1, 1, 4]


def test_what_is_left_of_early_memory_is_given_back() -> None:
    early = EarlyMemory(4 * ARRAY_BYTES, LoggingSupervisor())
    early.wait()
    before = resident_bytes()
    with weights_together(early):
        kept = weight_memory(1000).fill_(7)
    assert early.take() is None
    assert before - resident_bytes() > 3 * ARRAY_BYTES
    assert bool((kept == 7).all())


def test_the_next_weight_has_what_was_given_back() -> None:
    early = EarlyMemory(1 << 20, LoggingSupervisor())
    with weights_together(early):
        for size in (1000, 3 << 20, 80 << 20):  # of early memory, of an array, of one of its own
            first = weight_memory(size).fill_(1)
            place = first.data_ptr()
            give_back(first)
            again = weight_memory(size)
            assert not again.any()
            assert (again.data_ptr() == place) == (size <= ARRAY_BYTES)
