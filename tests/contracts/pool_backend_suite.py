"""What every pool backend must do. Inherit `PoolBackendContract` and provide `open`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest
from tests.contracts.block_store_suite import key_of

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.backend import Parts, PoolBackend
from stemma.memory.tiers.pool.envelope import damage, seal
from stemma.memory.tiers.pool.keys import PoolKeys

VALUE_BYTES = 4096 + 64
KEYS = PoolKeys("org/model v1")


def name_of(number: object) -> str:
    return KEYS.own(key_of(number))


def value_of(name: str) -> bytes:
    return (name.encode() * (VALUE_BYTES // len(name) + 1))[:VALUE_BYTES]


def parts_of(name: str) -> Parts:
    value = memoryview(bytearray(value_of(name)))
    return (value[:64], value[64:])


def sealed_parts_of(name: str) -> Parts:
    header, payload = parts_of(name)
    seal(name, payload, header)
    return (header, payload)


def read(backend: PoolBackend, names: list[str]) -> list[ReadResult]:
    """Read into two parts each and prove that every hit is the whole value."""
    buffers = [bytearray(VALUE_BYTES) for _ in names]
    results = backend.get_many(names, [(memoryview(b)[:64], memoryview(b)[64:]) for b in buffers])
    for name, buffer, result in zip(names, buffers, results, strict=True):
        if result is ReadResult.HIT:
            assert buffer == value_of(name)
    return results


class PoolBackendContract(ABC):
    @abstractmethod
    def open(self) -> PoolBackend:
        """Open the backend; a second call sees the same values."""

    @pytest.fixture
    def backend(self) -> Iterator[PoolBackend]:
        backend = self.open()
        yield backend
        backend.close()

    def test_what_was_put_is_read(self, backend: PoolBackend) -> None:
        names = [name_of(f"read{n}") for n in range(5)]
        assert backend.put_many(names, [parts_of(name) for name in names]) == [PutResult.STORED] * 5
        assert backend.exists_many(names) == [True] * 5
        assert read(backend, names) == [ReadResult.HIT] * 5

    def test_one_part_or_many_is_the_same_value(self, backend: PoolBackend) -> None:
        name = name_of("one part")
        assert backend.put_many([name], [(memoryview(bytearray(value_of(name))),)]) == [PutResult.STORED]
        assert read(backend, [name]) == [ReadResult.HIT]
        whole = bytearray(VALUE_BYTES)
        assert backend.get_many([name], [(memoryview(whole),)]) == [ReadResult.HIT]
        assert whole == value_of(name)

    def test_results_are_per_key(self, backend: PoolBackend) -> None:
        first, absent, last = (name_of(f"per key {n}") for n in range(3))
        backend.put_many([first, last], [parts_of(first), parts_of(last)])
        assert backend.exists_many([first, absent, last]) == [True, False, True]
        assert read(backend, [first, absent, last]) == [ReadResult.HIT, ReadResult.MISS, ReadResult.HIT]

    def test_empty_batches(self, backend: PoolBackend) -> None:
        assert backend.exists_many([]) == []
        assert backend.get_many([], []) == []
        assert backend.put_many([], []) == []
        assert backend.remove([]) == 0

    def test_an_existing_key_keeps_its_value(self, backend: PoolBackend) -> None:
        name = name_of("existing")
        backend.put_many([name], [parts_of(name)])
        assert backend.put_many([name], [parts_of(name_of("other"))]) == [PutResult.EXISTS]
        assert read(backend, [name]) == [ReadResult.HIT]

    def test_a_value_that_is_longer_is_corrupt_and_can_be_replaced(self, backend: PoolBackend) -> None:
        name = name_of("long")
        backend.put_many([name], [(memoryview(bytes(VALUE_BYTES + 9)),)])
        assert read(backend, [name]) == [ReadResult.CORRUPT]
        backend.remove([name])
        assert backend.put_many([name], [parts_of(name)]) == [PutResult.STORED]
        assert read(backend, [name]) == [ReadResult.HIT]

    def test_a_value_that_is_shorter_begins_its_buffer(self, backend: PoolBackend) -> None:
        """A packed block: its header says how long it is."""
        name, value = name_of("short"), bytes(range(100))
        backend.put_many([name], [(memoryview(value),)])
        into = bytearray(VALUE_BYTES)
        assert backend.get_many([name], [(memoryview(into),)]) == [ReadResult.HIT]
        assert into[:100] == value

    def test_removed_keys_are_misses(self, backend: PoolBackend) -> None:
        name = name_of("removed")
        backend.put_many([name], [parts_of(name)])
        assert read(backend, [name]) == [ReadResult.HIT]
        assert backend.remove([name, name_of("never there")]) == 1
        assert backend.exists_many([name]) == [False]
        assert read(backend, [name]) == [ReadResult.MISS]

    def test_another_client_sees_the_value(self, backend: PoolBackend) -> None:
        name = name_of("seen by both")
        backend.put_many([name], [parts_of(name)])
        other = self.open()
        try:
            assert other.exists_many([name]) == [True]
            assert read(other, [name]) == [ReadResult.HIT]
        finally:
            other.close()

    def test_many_threads_take_only_sound_values(self, backend: PoolBackend) -> None:
        """A backend may hand out foreign bytes while keys are removed (Mooncake does): the header tells."""
        names = [name_of(f"thread {n}") for n in range(24)]
        wrong: list[BaseException] = []
        num_sound = 0

        def work(offset: int) -> None:
            nonlocal num_sound
            try:
                for turn in range(10):
                    some = [names[(offset * 5 + turn * 3 + n) % len(names)] for n in range(4)]
                    backend.put_many(some, [sealed_parts_of(name) for name in some])
                    into = [
                        (memoryview(bytearray(64)), memoryview(bytearray(VALUE_BYTES - 64))) for _ in some
                    ]
                    results = backend.get_many(some, into)
                    for name, parts, result in zip(some, into, results, strict=True):
                        if result is ReadResult.HIT and damage(name, *parts) is None:
                            assert parts[1] == value_of(name)[64:]
                            num_sound += 1
                    backend.remove(some[:1])
            except (AssertionError, StorageError, ValueError) as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert num_sound > 0

    def test_close_twice_then_use(self) -> None:
        backend = self.open()
        backend.close()
        backend.close()
        with pytest.raises(StorageError):
            backend.exists_many([name_of("closed")])
