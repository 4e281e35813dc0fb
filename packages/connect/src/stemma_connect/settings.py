"""Settings of connectors: the tiers below an engine that isn't ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from stemma.config.base import SettingsModel
from stemma.config.settings import PoolSettings, TierSettings
from stemma.config.sizes import ByteSize
from stemma.errors import ConfigError


class GivenSettings(SettingsModel):
    """Settings that come as a JSON object through another engine's flags."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], *, where: str) -> Self:
        """Return the checked settings; raise ConfigError that names every wrong field of `where`."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            wrong = (
                f"{'.'.join(map(str, part['loc'])) or 'settings'}: {part['msg']}" for part in error.errors()
            )
            raise ConfigError(f"{where}: {'; '.join(wrong)}") from error
        except ConfigError as error:  # a size that is none
            raise ConfigError(f"{where}: {error}") from error


class LowerTierSettings(GivenSettings):
    """The disk and the pool below another engine."""

    disk_cache: Path | None = None
    """Directory for blocks that outlive the engine. One engine at a time uses it."""
    disk_cache_size: ByteSize = 10 * 10**9
    """Limit of all files in that directory."""
    disk_cache_ttl_s: float | None = Field(default=None, gt=0.0)
    """Blocks on disk that were unused for this time are dropped."""
    pool: PoolSettings | None = None
    """A pool shared with other machines, by the names that `stemma serve --pool` takes."""
    eviction: str = "hazard"
    """Policy by name, options after it."""


class ConnectorSettings(LowerTierSettings):
    """Tiers, and how they are used. Blocks are written through: other engines don't tell what they evict."""

    host_cache: ByteSize | None = None
    """DRAM for blocks, allocated at the start."""
    load_when: Literal["faster", "always"] = "faster"
    """Load a hit only if measurements predict that it is faster than computing, or always."""
    load_timeout_s: float = Field(default=2.0, gt=0.0)
    """Time limit of a load; blocks not loaded by then are computed."""
    transfer_buffer: ByteSize | None = None
    """Host memory for blocks on their way to disk and pool; None: what two steps commit."""

    @model_validator(mode="after")
    def _has_a_tier(self) -> Self:
        if self.host_cache is None and self.disk_cache is None and self.pool is None:
            raise ValueError("no tier: give host_cache, disk_cache or pool")
        return self

    @property
    def tiers(self) -> TierSettings:
        """The same, as the tiers take them."""
        shared = {
            name: getattr(self, name) for name in TierSettings.model_fields.keys() & self.model_fields_set
        }
        return TierSettings(host_write="write_through", disk_write="write_through", **shared)


class StorageSettings(LowerTierSettings):
    """Tiers below an engine that keeps a host tier of its own."""

    model: Path | None = None
    """Directory of the checkpoint, whose content names the pages; default: the engine's model name, if that
    is a directory."""

    @model_validator(mode="after")
    def _has_a_tier(self) -> Self:
        if self.disk_cache is None and self.pool is None:
            raise ValueError("no tier: give disk_cache or pool")
        return self
