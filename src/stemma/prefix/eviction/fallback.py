"""When its policy raises, an index continues with LRU, so that no block is lost.

A ranking is only advice. An index changes its own structure first and tells the policy afterwards, in one
`try`. If the policy raises there, its state is no longer trusted. A fresh LRU policy is told every block and
every candidate of the structure, and replaces it permanently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import DEFAULT_TRAITS, EvictionPolicy

logger = logging.getLogger(__name__)


def fall_back(
    failed: EvictionPolicy, error: Exception, block_ids: Iterable[int], candidates: Iterable[int]
) -> EvictionPolicy:
    """Return an LRU policy that knows `block_ids` (parents first, oldest first) and offers `candidates`.

    Logs `error` with its traceback. Raises it if `failed` is such a fallback already: another LRU would fail
    for the same reason.
    """
    if isinstance(failed, _Fallback):
        raise error
    logger.error("eviction policy %s failed; LRU takes over: %r", failed.name, error, exc_info=error)
    policy = _Fallback()
    ids = list(dict.fromkeys(block_ids))
    if ids:
        policy.insert(np.asarray(ids, dtype=np.int32), 0.0, DEFAULT_TRAITS)
    for block_id in candidates:
        policy.offer(block_id)
    return policy


class _Fallback(LRUPolicy):
    """LRU that took over."""
