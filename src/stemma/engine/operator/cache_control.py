"""The operator's commands to the cache of a running engine: look up, pin, flush, export and import prefixes.

Everything that touches the index runs between two steps; everything that moves many bytes or asks a pool runs
in a thread, on blocks that a lease holds meanwhile.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeVar

import torch

from stemma.engine.core.engine import Engine
from stemma.engine.core.tree_outline import MAX_BELOW, TreeOutline, add_copies, add_lower, outline_tree
from stemma.engine.operator.cache_answers import CacheLookup, FlushReport, Pin
from stemma.errors import InvalidRequest, Overloaded, StorageMismatch
from stemma.memory.cache.lease import Lease
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.tiers.bundle import (
    BundleHeader,
    BundleTrust,
    read_blocks,
    read_header,
    read_pieces,
    write_bundle,
)
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace
from stemma.types import BlockKey, Tier, TokenArray

T = TypeVar("T")
MAX_PINNED_FRACTION = 0.5
"""Largest part of the device tier that pins may take: other requests can't use it."""


class RunBetweenSteps(Protocol):
    """Runs a function on the step loop, between two steps."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        """Return what the function returns, or raise what it raises."""


@dataclass(slots=True)
class _Held:
    pin: Pin
    lease: Lease
    lower_pins: dict[Tier, list[BlockKey]]
    timer: asyncio.TimerHandle | None = None


class CacheControl:
    """One engine's cache, from the event loop."""

    def __init__(
        self,
        engine: Engine,
        device: DeviceCopy,
        key_space: KeySpace,
        run: RunBetweenSteps,
        *,
        num_ranks: int = 1,
    ) -> None:
        self._engine = engine
        self._cache = engine.cache
        self._device = device
        self._space = key_space
        self._run = run
        self._num_ranks = num_ranks
        self._background: set[asyncio.Future[Any]] = set()
        self._held: dict[str, _Held] = {}
        """The event loop's."""
        self._pinned: Counter[int] = Counter()
        """Block -> pins that hold it, those being made included. The step loop's."""

    async def outline(self, max_nodes: int) -> TreeOutline:
        """Return the tree as numbers: the device's nodes, their copies, and what only local tiers hold."""
        outline, blocks = await self._run(lambda: outline_tree(self._cache, max_nodes))

        def complete() -> None:
            add_copies(outline, blocks, self._cache.below.lookup_local)
            held = self._cache.below.newest(MAX_BELOW)
            if DEFAULT_NAMESPACE not in outline.namespaces and any(held.values()):
                outline.namespaces.append(DEFAULT_NAMESPACE)  # after a restart only the disk has anything
            roots = {self._space.roots(one).first: n for n, one in enumerate(outline.namespaces)}
            add_lower(outline, blocks, held, roots, max_nodes)

        await asyncio.to_thread(complete)
        return outline

    async def lookup(self, namespace: Namespace, tokens: TokenArray) -> CacheLookup:
        """Return how many tokens of a prompt lie in which tier."""
        num_device = await self._run(lambda: self._cache.match(namespace, tokens))
        keys = self._keys(namespace, tokens)
        size = self._space.block_size
        where = await asyncio.to_thread(self._cache.below.lookup, keys)
        served = {Tier.DEVICE: num_device}
        for n in range(num_device // size, len(keys)):
            tier = next((tier for tier, there in where.items() if there[n]), None)
            if tier is None:
                break
            served[tier] = served.get(tier, 0) + size
            if n == num_device // size:  # this block replaces the part of it that the device has
                served[Tier.DEVICE] = n * size
        return CacheLookup(
            num_prompt_tokens=len(tokens),
            num_cached_tokens=sum(served.values()),
            served_by_tier={tier: count for tier, count in served.items() if count},
            tokens_by_tier={Tier.DEVICE: num_device}
            | {tier: sum(there) * size for tier, there in where.items()},
        )

    async def pin(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None = None) -> Pin:
        """Forbid eviction of the full blocks of a prompt, in every local tier that holds them now.

        Of a model with recurrent layers or windows, of the checkpoints that prompts go on from, too.

        Raises InvalidRequest if nothing of it is cached, or too much would be pinned.
        """
        lease = await self._borrow(lambda: self._hold(namespace, tokens), self._let_go)
        assert lease is not None
        keys = self._keys(namespace, tokens)
        size = self._space.block_size
        counts = {Tier.DEVICE: lease.num_committed * size}
        pin = Pin(uuid.uuid4().hex, len(tokens), {t: n for t, n in counts.items() if n}, ttl_s)
        held = self._held[pin.pin_id] = _Held(pin, lease, {})
        self._engine.end_transient_hold()
        if ttl_s is not None:
            held.timer = asyncio.get_running_loop().call_later(ttl_s, self._expire, pin.pin_id)
        try:
            await self._in_background(self._pin_lower(held, keys))
        except asyncio.CancelledError:
            self._take_out(pin.pin_id)  # nobody will learn its id
            raise
        blocks = set(keys)
        counts |= {
            tier: size * sum(key in blocks for key in held.lower_pins[tier]) for tier in held.lower_pins
        }
        held.pin = replace(pin, tokens_by_tier={t: n for t, n in counts.items() if n})
        if not held.pin.tokens_by_tier:
            await self.unpin(pin.pin_id)
            raise InvalidRequest("nothing of this prompt is cached; prewarm it first", param="prompt")
        return held.pin

    async def unpin(self, pin_id: str) -> Pin:
        """Permit eviction again. Raises InvalidRequest for an unknown id."""
        taken = self._take_out(pin_id)
        if taken is None:
            raise InvalidRequest(f"there is no pin {pin_id!r}", param="pin_id")
        pin, done = taken
        await done
        return pin

    def _take_out(self, pin_id: str) -> tuple[Pin, asyncio.Future[None]] | None:
        """End a pin in the background; return it, and what tells that it is done. None: it is gone."""
        held = self._held.pop(pin_id, None)
        if held is None:
            return None
        if held.timer is not None:
            held.timer.cancel()
        return held.pin, self._in_background(self._unpin(held))

    async def _pin_lower(self, held: _Held, keys: list[BlockKey]) -> None:
        """Pin in the lower tiers too; in a thread, for the event loop doesn't wait for a store's lock."""
        pieces = self._cache.checkpoint_keys(keys)
        pins = await asyncio.to_thread(self._cache.below.pin, [*keys, *pieces])
        if held.pin.pin_id in self._held:
            held.lower_pins = pins
        else:  # unpinned meanwhile
            await asyncio.to_thread(self._cache.below.unpin, pins)

    async def _unpin(self, held: _Held) -> None:
        await asyncio.to_thread(self._cache.below.unpin, held.lower_pins)
        await self._run(lambda: self._let_go(held.lease, held.lease.num_tokens))

    def pins(self) -> list[Pin]:
        """Return all pins, oldest first."""
        return [held.pin for held in self._held.values()]

    async def set_quotas(self, quotas: Mapping[str, Mapping[Tier, int]]) -> None:
        """Limit the bytes that the blocks of each owner (`Namespace.owner`) may take, by tier."""
        block_bytes = self._device.block_bytes
        by_tier = {
            tier: {name: sizes[tier] // block_bytes for name, sizes in quotas.items() if tier in sizes}
            for tier in Tier
        }
        on_device = by_tier.pop(Tier.DEVICE)
        await self._run(lambda: self._cache.set_quotas(on_device))
        await asyncio.to_thread(self._cache.below.set_quotas, by_tier)

    async def flush(self) -> FlushReport:
        """Drop every block that no request or pin holds from device, host and disk. A shared pool stays."""
        freed = {Tier.DEVICE: await self._run(self._flush_device)}
        kept = {Tier.DEVICE: await self._run(lambda: self._cache.stats().num_cached_blocks)}
        freed |= await asyncio.to_thread(self._cache.below.flush)
        if (transfer := self._cache.below.stats()) is not None:
            tiers = transfer.tiers
            kept |= {tier: stats.num_blocks for tier, stats in tiers.items() if stats.num_blocks is not None}
        return FlushReport(freed, kept, self._device.block_bytes)

    def _flush_device(self) -> int:
        self._engine.end_preparation()
        return self._cache.flush()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until blocks queued for lower tiers are written; return whether they are."""
        return await asyncio.to_thread(self._cache.below.drain, timeout_s)

    async def export(
        self, namespace: Namespace, tokens: TokenArray, file: BinaryIO, *, key: bytes | None = None
    ) -> int:
        """Write the cached leading blocks of a prompt to a file, signed with `key`; return how many.

        See `memory/tiers/bundle.py`. Raises InvalidRequest on several ranks.
        """
        self._check_whole()
        lease = await self._borrow(lambda: self._cache.hold(namespace, tokens))
        assert lease is not None
        keys, states = self._keys(namespace, tokens), self._cache.states
        blocks = self._read_blocks(lease, keys)
        checkpoint, pieces = (0, []) if states is None else states.held(lease)
        try:
            return await asyncio.to_thread(
                write_bundle,
                file,
                self._space,
                self._space.roots(namespace),
                tokens,
                blocks,
                block_bytes=self._device.block_bytes,
                key=key,
                checkpoint=checkpoint,
                pieces=[piece for piece, _ in pieces],
                read_piece=lambda number: self._read_block(pieces[number][1]),
            )
        finally:
            await self._give_up(lease, lease.num_tokens)

    async def import_(
        self, locate: Callable[[TokenArray], Namespace], file: BinaryIO, trust: BundleTrust
    ) -> tuple[BundleHeader, int]:
        """Take the blocks of a file into the device tier; return its header and how many blocks were new.

        `locate` returns the namespace of the file's prompt, with its published head if it has one. Raises
        UntrustedFile unless `trust` covers the file, StorageMismatch if the blocks belong to another model or
        namespace, StorageError if one is damaged (those before it stay), Overloaded if there is no room,
        InvalidRequest on several ranks.
        """
        self._check_whole()
        header = await asyncio.to_thread(read_header, file, trust)
        namespace = locate(header.tokens)
        header.check(
            self._space,
            self._space.roots(namespace),
            self._device.block_bytes,
            vocab_size=self._engine.vocab_size,
        )
        size = self._space.block_size
        tokens = header.tokens[: header.num_blocks * size]
        if not len(tokens):
            return header, 0
        num_present, reached = await self._run(lambda: self._present(namespace, tokens))
        if num_present == header.num_blocks and reached >= header.checkpoint:
            return header, 0
        lease = await self._borrow(lambda: self._cache.reserve(namespace, tokens, num_new=0))
        if lease is None:
            raise Overloaded("the device tier has no room for this prefix now")
        num_good = first = 0

        def take(position: int, key: BlockKey, data: memoryview) -> None:
            nonlocal num_good
            if position >= first:
                source = torch.frombuffer(data, dtype=torch.uint8)
                self._device.into([int(lease.block_table[position])], [source])
                num_good = position + 1

        try:
            while lease.pending is not None:
                await asyncio.wait([asyncio.wrap_future(lease.pending.num_loaded)])
                await self._run(lambda: self._cache.finish_load(lease))
            num_good = first = lease.num_cached_tokens // size
            await asyncio.to_thread(read_blocks, file, header, take)
            await self._bring_checkpoint(lease, file, header)
        finally:
            await self._give_up(lease, num_good * size)
        return header, max(0, num_good - max(first, num_present))

    async def _bring_checkpoint(self, lease: Lease, file: BinaryIO, header: BundleHeader) -> None:
        """Take the checkpoint of a file, whose KV is there, if it has one and there is room for it."""
        states = self._cache.states
        if states is None or not header.checkpoint:
            return
        pieces = await self._run(lambda: states.bring(lease, header.checkpoint))
        if pieces is None:
            return
        if len(pieces) != header.num_pieces:
            raise StorageMismatch(
                f"the file's checkpoint has {header.num_pieces} blocks, here it would have {len(pieces)}"
            )

        def take(number: int, _key: BlockKey, data: memoryview) -> None:
            self._device.into([pieces[number][1]], [torch.frombuffer(data, dtype=torch.uint8)])

        await asyncio.to_thread(read_pieces, file, header, [key for key, _ in pieces], take)
        await self._run(lambda: states.enter(lease))

    def _check_whole(self) -> None:
        if self._num_ranks > 1:
            raise InvalidRequest(
                f"this server has {self._num_ranks} ranks, which each hold a part of every block: prefixes "
                "can't be exported or imported; its disk tier keeps them across restarts"
            )

    async def _borrow(
        self, take: Callable[[], Lease | None], free: Callable[[Lease, int], None] | None = None
    ) -> Lease | None:
        """Take a lease for the time of a command. If the caller is cancelled meanwhile, it is freed.

        `free`: frees what `take` took; None: as the cache does.
        """

        def counted() -> Lease | None:
            lease = take()
            if lease is not None:
                self._engine.begin_transient_hold()
            return lease

        task = asyncio.ensure_future(self._run(counted))
        try:
            return await self._in_background(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self._free_unclaimed, free or self._cache.free))
            raise

    def _free_unclaimed(self, free: Callable[[Lease, int], None], task: asyncio.Future[Lease | None]) -> None:
        if not task.cancelled() and task.exception() is None and (lease := task.result()) is not None:
            num_cached = lease.num_cached_tokens or lease.num_committed * self._space.block_size
            self._in_background(self._give_up(lease, num_cached, free))

    async def _give_up(
        self, lease: Lease, num_computed: int, free: Callable[[Lease, int], None] | None = None
    ) -> None:
        """Free a lease that `_borrow` returned, also if the caller is cancelled meanwhile."""

        def give_up() -> None:
            self._engine.end_transient_hold()
            (free or self._cache.free)(lease, num_computed)

        await self._in_background(self._run(give_up))

    def _in_background(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Start work that goes on if whoever awaits the result is cancelled."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return asyncio.shield(task)

    def _present(self, namespace: Namespace, tokens: TokenArray) -> tuple[int, int]:
        """Return how many leading blocks are on the device, and the position of the deepest checkpoint."""
        lease = self._cache.hold(namespace, tokens)
        count, position = lease.num_committed, 0 if lease.state is None else lease.state.position
        self._cache.free(lease, lease.num_tokens)
        return count, position

    def _keys(self, namespace: Namespace, tokens: TokenArray) -> list[BlockKey]:
        return self._space.roots(namespace).chain(tokens)

    def _hold(self, namespace: Namespace, tokens: TokenArray) -> Lease:
        """Take the lease of a pin, and count its blocks. On the step loop."""
        lease = self._cache.hold(namespace, tokens)
        num_pinned = len(self._pinned)
        if num_pinned + lease.num_blocks > MAX_PINNED_FRACTION * self._cache.num_blocks:
            self._cache.free(lease, lease.num_tokens)
            raise InvalidRequest(
                f"pins may take {MAX_PINNED_FRACTION:.0%} of the device tier's {self._cache.num_blocks} "
                f"blocks; {num_pinned} are pinned and this prompt has {lease.num_blocks}",
                param="prompt",
            )
        self._pinned.update(lease.block_table.tolist())
        return lease

    def _let_go(self, lease: Lease, num_computed: int) -> None:
        """Free the lease of a pin. On the step loop."""
        self._pinned -= Counter(lease.block_table.tolist())
        self._cache.free(lease, num_computed)

    def _expire(self, pin_id: str) -> None:
        self._take_out(pin_id)  # it may be gone: `unpin` was faster

    def _read_block(self, block_id: int) -> memoryview:
        """Return a copy of the bytes of a block on the device."""
        copy = torch.empty(self._device.block_bytes, dtype=torch.uint8)
        self._device.out([block_id], [copy])
        view: memoryview = copy.numpy().data
        return view

    def _read_blocks(self, lease: Lease, keys: list[BlockKey]) -> Iterator[memoryview]:
        """Yield the bytes of leading blocks: those the lease holds, then what lower tiers have."""
        device = self._device
        scratch = torch.empty(device.block_bytes, dtype=torch.uint8, pin_memory=device.pins_memory)
        view: memoryview = scratch.numpy().data
        for block_id in lease.block_table[: lease.num_committed].tolist():
            self._device.out([block_id], [scratch])
            yield view
        for key in keys[lease.num_committed :]:
            if not self._cache.below.read(key, view):
                return
            yield view
