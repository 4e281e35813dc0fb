"""Every flipped bit, swapped key or other length is noticed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.memory.tiers.pool.envelope import HEADER_BYTES, Damage, damage, seal


def sealed(key: str, payload: bytes) -> bytearray:
    header = bytearray(HEADER_BYTES)
    seal(key, memoryview(payload), memoryview(header))
    return header


@settings(max_examples=60)
@given(st.text(max_size=20), st.binary(min_size=1, max_size=300), st.data())
def test_one_flipped_bit_anywhere_is_damage(key: str, payload: bytes, data: st.DataObject) -> None:
    value = sealed(key, payload) + payload
    bit = data.draw(st.integers(0, len(value) * 8 - 1))
    # Bytes 10..15 and 48..55 are spare, but the header's own checksum covers them too.
    value[bit // 8] ^= 1 << bit % 8
    view = memoryview(value)
    assert damage(key, view[:HEADER_BYTES], view[HEADER_BYTES:]) is not None


@given(st.text(max_size=20), st.binary(max_size=300))
def test_an_untouched_value_is_sound(key: str, payload: bytes) -> None:
    assert damage(key, memoryview(sealed(key, payload)), memoryview(payload)) is None


def test_each_damage_has_its_name() -> None:
    header = memoryview(sealed("key", b"payload"))
    assert damage("other", header, memoryview(b"payload")) is Damage.KEY
    assert damage("key", header, memoryview(b"payloaD")) is Damage.CHECKSUM
    assert damage("key", header, memoryview(b"payloa")) is Damage.LENGTH
    assert damage("key", memoryview(bytes(HEADER_BYTES)), memoryview(b"payload")) is Damage.HEADER
