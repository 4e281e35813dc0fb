"""The pool of a running engine, seen from the event loop: attach, detach, status, and waiting for writes.

Whatever talks to a pool's servers runs in a thread of its own; the step loop only swaps the tier, between two
steps. So a pool that hangs while it is attached or detached delays nobody but the operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stemma.config.settings import PoolSettings, Role
from stemma.engine.operator.cache_control import RunBetweenSteps
from stemma.engine.ranks.pool import OtherPools
from stemma.errors import ConfigError, StemmaError
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.pool.opening import open_pool
from stemma.memory.tiers.pool.pool_store import PoolStatus, PoolStore
from stemma.memory.tiers.transfer import TierTransfer
from stemma.prefix.keys import KeySpace
from stemma.types import Tier

WRITE_TIMEOUT_S = 30.0
"""Time limit of a request's last output for its blocks to be in the pool."""


class PoolAttachment:
    """Attaches and detaches the pool of one engine. Methods are for one event loop."""

    def __init__(
        self,
        transfer: TierTransfer,
        key_space: KeySpace,
        layout: KVLayout,
        role: Role,
        *,
        others: OtherPools | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """`others`: of the other ranks; `part`: see `open_pool`."""
        self._transfer = transfer
        self._others = others
        self._part = part
        self._key_space = key_space
        self._layout = layout
        self._role = role
        self._changing = asyncio.Lock()
        self.wanted: PoolSettings | None = None
        """A pool that didn't answer at the start, to be attached once it does."""

    @property
    def store(self) -> PoolStore | None:
        """The pool in use."""
        return next((store for store in self._transfer.stores if isinstance(store, PoolStore)), None)

    def status(self) -> PoolStatus | None:
        """Return the status of the attached pool, on rank 0; None: there is none."""
        store = self.store
        return None if store is None else store.status()

    async def attach(self, settings: PoolSettings, between_steps: RunBetweenSteps) -> None:
        """Open a pool and use it from the next step on.

        Raises ConfigError if there is one already or the settings are wrong, StorageError if it can't be
        reached; then nothing has changed.
        """
        async with self._changing:
            if self.store is not None:
                raise ConfigError("there is a pool already; detach it first")
            store = await asyncio.to_thread(self._open, settings)

            def swap() -> None:
                if self._others is not None:
                    self._others.attach(settings.write)
                self._transfer.attach(store, settings.write)

            try:
                await between_steps(swap)
            except StemmaError:
                await asyncio.to_thread(self._drop, store)
                raise

    def _drop(self, store: PoolStore) -> None:
        """Close what `_open` opened. Slow."""
        store.close()
        if self._others is not None:
            self._others.drop()

    def _open(self, settings: PoolSettings) -> PoolStore:
        """Open the pool on all ranks. Slow."""
        block_bytes, pins = self._layout.block_bytes, self._transfer.pins_memory
        codec = self._transfer.codec
        store = open_pool(
            settings, self._key_space, block_bytes, pin_memory=pins, part=self._part, codec=codec
        )
        try:
            self._transfer.introduce(store)
            if self._others is not None:
                self._others.open(settings)
        except StemmaError:
            store.close()
            raise
        return store

    async def detach(self, between_steps: RunBetweenSteps) -> bool:
        """Stop using the pool, write what is queued and close it; return whether there was one."""
        finish: list[Callable[[], None]] = []

        def swap() -> None:
            rest = self._transfer.detach(Tier.POOL)
            if rest is not None:
                finish.append(rest)
                if self._others is not None:
                    finish.append(self._others.detach())

        async with self._changing:
            await between_steps(swap)
            for rest in finish:
                await asyncio.to_thread(rest)
        return bool(finish)

    async def settle(self, between_steps: RunBetweenSteps) -> None:
        """Where writes are synchronous, wait until the blocks committed so far are written or have failed.

        A prefill server always waits: its answer tells that the decode server may look.
        """
        store = self.store
        if store is None or (self._role != "prefill" and store.settings.async_write):
            return
        await between_steps(lambda: None)  # a sequence ended by its stop string is freed only now
        await asyncio.to_thread(self._transfer.wait_for_queued, Tier.POOL, WRITE_TIMEOUT_S)
        if self._others is not None:
            await asyncio.to_thread(self._others.wait_for_queued, WRITE_TIMEOUT_S)
