"""Memory that the lower tiers will reserve, computed before they are opened.

These are the sums of `reserved_bytes` of the open tiers; a test compares them.
"""

from __future__ import annotations

from stemma.config.settings import PoolSettings, TierSettings
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.chunks import num_buffers
from stemma.memory.tiers.copies_down import num_staging_slots
from stemma.memory.tiers.disk.disk_store import capacity_of
from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.loads import NUM_LOAD_THREADS
from stemma.memory.tiers.pool.absent import ABSENT_BYTES
from stemma.memory.tiers.pool.pool_store import NOTES_BYTES
from stemma.memory.tiers.pool.value_staging import staging_bytes
from stemma.memory.tiers.slot_room import num_slots, paged
from stemma.memory.tiers.slotted import table_bytes
from stemma.memory.tiers.transfer import remembered_bytes
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import KeySpace
from stemma.types import Tier


def planned_bytes(
    settings: TierSettings,
    pool: PoolSettings | None,
    layout: KVLayout,
    eviction: str,
    step_tokens: int,
    codec: BlockCodec | None = None,
) -> int:
    """Return the maximum memory, in bytes, of the tiers that the settings name; tables are estimated.

    `step_tokens`: the most that a step computes. `codec` packs blocks.
    """
    policy, block_bytes = make_policy(eviction), layout.block_bytes
    total, tiers = 0, set()
    if settings.host_cache is not None:
        tiers.add(Tier.HOST)
        whole = settings.host_cache // block_bytes
        num_blocks = whole if codec is None else num_slots(settings.host_cache, paged(block_bytes))
        total += whole * block_bytes if codec is None else settings.host_cache
        total += table_bytes(num_blocks, policy)
    if settings.disk_cache is not None:
        tiers.add(Tier.DISK)
        space = KeySpace("", layout.describe(), layout.block_size)
        num_blocks = capacity_of(space, block_bytes, settings.disk_cache_size, packs=codec is not None)
        total += num_blocks * RECORD_BYTES + table_bytes(num_blocks, policy)
    if pool is not None:
        tiers.add(Tier.POOL)
        total += staging_bytes(pool.staging, block_bytes) + ABSENT_BYTES + NOTES_BYTES
    if tiers - {Tier.HOST}:
        slots = num_staging_slots(settings.transfer_buffer, block_bytes, layout.block_size, step_tokens)
        total += slots * block_bytes
    if tiers - {Tier.HOST} or (tiers and codec is not None):
        total += NUM_LOAD_THREADS * num_buffers(block_bytes) * block_bytes
    if tiers and codec is not None:
        total += codec.reserved_bytes
    return total + remembered_bytes(tiers)
