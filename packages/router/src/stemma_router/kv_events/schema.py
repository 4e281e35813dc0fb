"""The format of KV events: vLLM's (`vllm/distributed/kv_events.py`, version 0.32), as MessagePack.

A batch is the array [time, events, rank]. An event is a map whose `type` is its name; vLLM before 0.30 wrote
arrays that begin with the name, which are read too. Hashes of blocks are bytes (ours) or integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
"""Tiers: device, host, disk."""
CHECKPOINT_KIND, CHECKPOINT_GROUP = "checkpoint", 1
"""Of a `BlockStored` without tokens that tells of a checkpoint behind the block `parent_block_hash`."""
KV_KINDS = ("full_attention", "mla_attention")
"""Kinds of groups, as vLLM names them, whose blocks hold KV of every token."""

Hash = bytes | int
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
    "BlocksHeld": ("hashes", "names", "tiers", "block_size"),
}


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that a tier now holds; without tokens, blocks of which another tier was told before."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    """Which of a server's layers hold these blocks; None: all."""
    kv_cache_spec_kind: str | None = None
    """What layers of the group keep."""
    has_checkpoints: bool = False
    """Ours: the server goes on from its checkpoints alone (`CHECKPOINT_KIND`), whatever KV it holds."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that left a tier."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """Every tier is empty, or what it holds must be taken as unknown."""


class BlocksHeld(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that are in tiers now, by 64 bits of the server's hashes and by routers' names."""

    hashes: bytes
    """Words of 8 bytes, little-endian (`names.told_words`)."""
    names: bytes
    """As many words."""
    tiers: bytes
    """A byte each: 1 device, 2 host, 4 disk."""
    block_size: int
    has_checkpoints: bool = False
    """As in `BlockStored`."""

    @property
    def is_sound(self) -> bool:
        """Whether all parts have the same number of blocks."""
        num_bytes = 8 * len(self.tiers)
        return len(self.hashes) == len(self.names) == num_bytes and 0 < self.block_size <= MAX_BLOCK_SIZE


MAX_BLOCK_SIZE = 65_536
SNAPSHOT = b"snapshot"
"""Asks the replay socket for all live blocks, in place of a number. Other servers take it for a number so
large that they have nothing from there on."""
Event = BlockStored | BlockRemoved | AllBlocksCleared | BlocksHeld


@dataclass(frozen=True, slots=True)
class MalformedEvents(Exception):
    """A message that is no batch of events."""

    reason: str


def encode(timestamp_s: float, events: Sequence[Event], rank: int = 0) -> bytes:
    """Return a batch as MessagePack."""
    return msgspec.msgpack.encode([timestamp_s, list(events), rank])


def decode(payload: bytes) -> list[Event]:
    """Return the events of a batch; those of unknown types are left out. Raises MalformedEvents."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEvents(str(error)) from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise MalformedEvents("a batch is an array of a time, events and a rank")
    try:
        events = [msgspec.convert(event, Event) for event in _known(batch[1])]
    except msgspec.ValidationError as error:
        raise MalformedEvents(str(error)) from error
    if any(isinstance(event, BlocksHeld) and not event.is_sound for event in events):
        raise MalformedEvents("BlocksHeld has parts of different lengths")
    return events


def _known(events: list[Any]) -> Iterator[Mapping[str, Any]]:
    for event in events:
        if isinstance(event, dict):
            named: Mapping[str, Any] = event
        elif isinstance(event, list) and event and event[0] in _FIELDS:
            named = {"type": event[0], **dict(zip(_FIELDS[event[0]], event[1:], strict=False))}
        else:
            raise MalformedEvents("an event is a map with a type")
        if (fields := _FIELDS.get(str(named.get("type")))) is not None:
            # Older versions have fewer fields; what is missing is None.
            yield {**{name: None for name in fields if name not in named}, **named}
