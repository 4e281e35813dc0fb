"""A pool that doesn't answer when a server starts: it starts without it."""

from __future__ import annotations

import logging

from stemma.config.settings import PoolSettings, Settings
from stemma.errors import StorageError
from stemma.memory.tiers.pool.opening import check_pool

_log = logging.getLogger(__name__)


def without_late_pool(settings: Settings) -> tuple[Settings, PoolSettings | None]:
    """Return settings that a server can start with now, and a pool that doesn't answer yet.

    Only one that a server does without: not with roles, which need it, nor on several ranks. Mooncake's
    client is slow to open, and is opened once.
    """
    engine = settings.engine
    pool = engine.cache.pool
    if pool is None or pool.name == "mooncake" or engine.role != "both" or engine.parallel.num_ranks > 1:
        return settings, None
    try:
        check_pool(pool)
    except StorageError as error:
        _log.warning("%s; the server starts without it, and tries again", error)
        cache = engine.cache.model_copy(update={"pool": None})
        without = engine.model_copy(update={"cache": cache})
        return settings.model_copy(update={"engine": without}), pool
    return settings, None
