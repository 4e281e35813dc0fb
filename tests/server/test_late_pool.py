"""A pool that is down when the server starts: the server serves, and uses the pool once it answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stemma.cli.late_pool import without_late_pool
from stemma.config.settings import CacheSettings, EngineSettings, ModelSettings, PoolSettings, Settings
from stemma.errors import ConfigError, StorageError
from stemma.server.operator import late_pool
from stemma.server.operator.late_pool import attaching_late_pool


def with_pool(tmp_path: Path, name: str = "redis", **engine: Any) -> Settings:
    config = tmp_path / "pool.json"
    config.write_text('{"url": "redis://127.0.0.1:1/0"}')
    cache = CacheSettings(pool=PoolSettings(name=name, config=config))
    return Settings(engine=EngineSettings(model=ModelSettings(path=tmp_path), cache=cache, **engine))


def test_a_server_starts_without_a_redis_that_does_not_answer(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    settings = with_pool(tmp_path)
    startable, late = without_late_pool(settings)
    assert startable.engine.cache.pool is None
    assert late == settings.engine.cache.pool


def test_a_server_that_needs_its_pool_does_not(tmp_path: Path) -> None:
    settings = with_pool(tmp_path, role="decode")
    assert without_late_pool(settings) == (settings, None)


class Engine:
    """One whose pool can't be reached for a while."""

    def __init__(self, *failures: Exception) -> None:
        self.pool = SimpleNamespace(wanted=PoolSettings(name="redis"))
        self.attached: list[str] = []
        self._failures = list(failures)

    async def attach_pool(self, settings: PoolSettings) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.attached.append(settings.name)


@pytest.mark.parametrize(
    ("failures", "attached"),
    [((), ["redis"]), ((StorageError("away"),) * 3, ["redis"]), ((ConfigError("there is one"),), [])],
)
async def test_it_is_tried_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, failures: tuple[Exception, ...], attached: list[str]
) -> None:
    monkeypatch.setattr(late_pool, "AGAIN_S", 0.001)
    engine = Engine(*failures)
    async with attaching_late_pool(cast(Any, engine)), asyncio.timeout(20):
        while engine.pool.wanted is not None:
            await asyncio.sleep(0.001)
    assert engine.attached == attached
