"""What is planned for lower tiers is what they report once they are open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.config.settings import PoolSettings, TierSettings
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.opening import open_tiers
from stemma.memory.tiers.reserved import planned_bytes
from stemma.prefix.keys import KeySpace

LAYOUT = KVLayout(2, 2, 16, 2, 8, "float32")


@pytest.mark.parametrize("eviction", ["lru", "hazard"])
@pytest.mark.parametrize(
    "names", [(), ("host",), ("disk",), ("pool",), ("host", "disk"), ("host", "disk", "pool")]
)
@pytest.mark.parametrize("buffer", [None, 1 << 18])
def test_the_plan_is_what_the_open_tiers_report(
    tmp_path: Path, names: tuple[str, ...], eviction: str, buffer: int | None
) -> None:
    settings = TierSettings(
        host_cache=1 << 20 if "host" in names else None,
        disk_cache=tmp_path / "disk" if "disk" in names else None,
        disk_cache_size=2 << 20,
        transfer_buffer=buffer,
    )
    pool = None
    if "pool" in names:
        config = tmp_path / "pool.json"
        config.write_text(json.dumps({"path": str(tmp_path / "pool")}))
        pool = PoolSettings(name="directory", config=config, staging=1 << 19)
    planned = planned_bytes(settings, pool, LAYOUT, eviction, step_tokens=512)
    space = KeySpace("model", LAYOUT.describe(), LAYOUT.block_size)
    tiers = open_tiers(
        settings, DeviceCopy(DeviceKV(LAYOUT, 8)), space, step_tokens=512, eviction=eviction, pool=pool
    )
    assert tiers.reserved_bytes == planned
    assert (planned > 0) == bool(names)
    tiers.close()
