"""The format of KV events is vLLM's: its bytes are read, and ours have its fields."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

pytest.importorskip("zmq", reason="the extra `events` isn't installed")

import msgspec

from stemma_router.kv_events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MalformedEvents,
    decode,
    encode,
)

VLLM_0_32 = (
    "93cb4029000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c420"
    "0101010101010101010101010101010101010101010101010101010101010101c4200202020202020202020202"
    "020202020202020202020202020202020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b65"
    "6e5f696473980001020304050607aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da34750"
    "55a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368"
    "655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564"
    "ac626c6f636b5f6861736865739207c42001010101010101010101010101010101010101010101010101010101"
    "01010101a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c65"
    "6172656400"
)
"""A `KVEventBatch` that vLLM 0.32 encoded: two blocks stored, two removed, all cleared."""


def test_a_batch_of_vllm_is_read() -> None:
    stored, removed, cleared = decode(bytes.fromhex(VLLM_0_32))
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([b"\x01" * 32, b"\x02" * 32], None)
    assert (stored.token_ids, stored.block_size, stored.medium) == (list(range(8)), 4, "GPU")
    assert removed == BlockRemoved([7, b"\x01" * 32], "GPU", 0)
    assert cleared == AllBlocksCleared()


def test_our_batch_has_the_fields_of_vllm() -> None:
    stored = BlockStored([b"a"], b"p", [1, 2], 2, None, "GPU", None)
    timestamp, events, rank = msgspec.msgpack.decode(encode(1.5, [stored, BlockRemoved([b"a"], "CPU")], 3))
    assert (timestamp, rank) == (1.5, 3)
    theirs = msgspec.msgpack.decode(bytes.fromhex(VLLM_0_32))[1]
    assert set(events[0]) <= set(theirs[0]) | {"lora_id", "lora_name"}
    assert events[0]["type"] == "BlockStored"
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "CPU"}
    assert decode(encode(1.5, [stored])) == [stored]


def test_events_as_arrays_and_of_unknown_types() -> None:
    old = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [5, 6], 2, None], ["AllBlocksCleared"]]])
    assert decode(old) == [BlockStored([1], None, [5, 6], 2, None, None, None), AllBlocksCleared()]
    assert decode(msgspec.msgpack.encode([0.0, [{"type": "BlockMoved", "x": 1}], 0])) == []


@given(st.binary(max_size=60))
def test_any_bytes_are_events_or_malformed(payload: bytes) -> None:
    with contextlib.suppress(MalformedEvents):
        decode(payload)


@pytest.mark.parametrize("batch", [[], 5, [0.0], [0.0, {}], [0.0, [3]], [0.0, [{"type": "BlockStored"}]]])
def test_a_batch_of_another_shape_is_malformed(batch) -> None:
    with pytest.raises(MalformedEvents):
        decode(msgspec.msgpack.encode(batch))
