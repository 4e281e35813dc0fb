"""Pools by name, and configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from stemma import guests
from stemma.errors import ConfigError
from stemma.memory.tiers.pool.backend import PoolBackend
from stemma.memory.tiers.pool.registry import known_pools, open_pool_backend, read_pool_config
from stemma.memory.tiers.pool.shared_directory import DirectoryPool


def open_third_party(config: Mapping[str, Any]) -> PoolBackend:
    return DirectoryPool.__new__(DirectoryPool)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'redsi'; known: directory, mooncake, redis"):
        open_pool_backend("redsi", {})


def test_an_entry_point_adds_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:open_third_party", "stemma.pools")

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [point] if group == "stemma.pools" and name in (None, "mine") else []

    monkeypatch.setattr(guests, "entry_points", entry_points)
    assert known_pools() == ["directory", "mine", "mooncake", "redis"]
    assert isinstance(open_pool_backend("mine", {}), DirectoryPool)


def test_json_and_toml_configurations_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"path": "/x", "capacity": "1GB"}')
    (tmp_path / "a.toml").write_text('path = "/x"\ncapacity = "1GB"\n')
    assert read_pool_config(tmp_path / "a.json") == read_pool_config(tmp_path / "a.toml")
    assert read_pool_config(None) == {}


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_broken_configuration_names_its_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pool.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"pool\.json"):
        read_pool_config(file)
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_pool_config(tmp_path / "none.json")
