"""Limits of the tenants' blocks, told to the engine when a file of keys has changed it."""

from __future__ import annotations

from collections.abc import Mapping

from stemma.engine.client import EngineClient
from stemma.server.door.keyfile import KeyFile
from stemma.types import Tier


class CacheQuotas:
    """The quotas of one server's tenants."""

    def __init__(self, keys: KeyFile | None, engine: EngineClient) -> None:
        self._keys = keys
        self._engine = engine
        self._applied: dict[str, Mapping[Tier, int]] = {}

    async def apply(self) -> None:
        """Tell the engine what the tenants' blocks may take, if that has changed since the last call."""
        if self._keys is None:
            return
        wanted = {one.name: one.entry.cache_bytes for one in self._keys.tenants if one.entry.cache_bytes}
        if wanted == self._applied:
            return
        before, self._applied = self._applied, wanted
        try:
            await self._engine.cache_control.set_quotas(wanted)
        except BaseException:
            self._applied = before
            raise
