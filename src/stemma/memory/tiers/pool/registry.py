"""Pool backends by name: ours, and those of installed packages.

A third party registers a backend by an entry point, whose object is a function from the parsed configuration
file to a `PoolBackend`::

    [project.entry-points."stemma.pools"]
    mypool = "mypackage.pool:open_backend"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from stemma import guests
from stemma.errors import ConfigError
from stemma.memory.tiers.pool.backend import PoolBackend

GROUP = "stemma.pools"
"""The entry point group."""

OpenBackend: TypeAlias = Callable[[Mapping[str, Any]], PoolBackend]
"""Opens a backend from its parsed configuration. Raises ConfigError, or StorageError if unreachable."""

_BUILT_IN = {
    "directory": "stemma.memory.tiers.pool.shared_directory",
    "mooncake": "stemma.memory.tiers.pool.mooncake",
    "redis": "stemma.memory.tiers.pool.redis",
}
"""Imported on use: each needs its own library. Each module has an `open_backend`."""


def known_pools() -> list[str]:
    """Return every name that `open_pool_backend` takes, sorted."""
    return sorted({*_BUILT_IN, *guests.names(GROUP)})


def open_pool_backend(name: str, config: Mapping[str, Any]) -> PoolBackend:
    """Open the backend called `name`.

    Raises ConfigError for an unknown name, a bad configuration or a missing library, and StorageError if the
    backend can't be reached.
    """
    return _factory(name)(config)


def _factory(name: str) -> OpenBackend:
    if name in _BUILT_IN:
        return cast(OpenBackend, import_module(_BUILT_IN[name]).open_backend)
    if (opens := guests.load(GROUP, name)) is not None:
        return cast(OpenBackend, opens)
    raise ConfigError(f"no pool is called {name!r}; known: {', '.join(known_pools())}")


def read_pool_config(path: Path | None) -> dict[str, Any]:
    """Return a pool's configuration file, JSON or TOML by its suffix; no file is an empty configuration."""
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        parsed = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"pool configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"pool configuration {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"pool configuration {path}: expected an object at the top")
    return parsed


class PoolConfig(BaseModel):
    """Base of the backends' configurations: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @classmethod
    def parse(cls, config: Mapping[str, Any], *, pool: str) -> Self:
        """Return the checked configuration of pool `pool`; raise ConfigError naming what is wrong."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            raise ConfigError(f"pool {pool}: {'; '.join(wrong)}") from error
