"""A pool that didn't answer when the server started: it is tried again until it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stemma.engine.client import EngineClient
from stemma.errors import ConfigError, StemmaError

_log = logging.getLogger(__name__)
AGAIN_S = 5.0


@asynccontextmanager
async def attaching_late_pool(engine: EngineClient) -> AsyncIterator[None]:
    """Try meanwhile to attach the pool that `engine.pool.wanted` names; then none is wanted any more."""
    trying = asyncio.create_task(_try_until_attached(engine))
    try:
        yield
    finally:
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)


async def _try_until_attached(engine: EngineClient) -> None:
    while engine.pool is not None and engine.pool.wanted is not None:
        await asyncio.sleep(AGAIN_S)
        wanted = engine.pool.wanted
        if wanted is None:
            return
        try:
            await engine.attach_pool(wanted)
            _log.warning("the pool %s answers, and is used from now on", wanted.name)
        except ConfigError as error:  # an operator attached another one meanwhile, or it can't be used at all
            _log.warning("the pool %s isn't tried again: %s", wanted.name, error)
        except StemmaError:
            continue
        engine.pool.wanted = None
