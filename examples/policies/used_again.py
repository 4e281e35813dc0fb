"""A policy of one's own: least recently used, but each further use counts as so many uses of others.

``stemma lab bench --policy lru,hazard,examples/policies/used_again.py:UsedAgain,min``
"""

from collections import Counter

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.stamped import RankedPolicy
from stemma.types import BlockIds


class UsedAgain(RankedPolicy):
    """Ranks by the last use, later by `BONUS` for each of up to three further uses."""

    name = "used-again"
    BONUS = 2000

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        self._reserve(block_ids)
        self._stamp(block_ids)
        for block_id in block_ids.tolist():
            self._uses[block_id] = 0

    def access(self, block_ids: BlockIds, now: float) -> None:
        self._stamp(block_ids)
        self._uses.update(block_ids.tolist())

    def _rank(self, block_id: int) -> int:
        return self._stamps.item(block_id) + self.BONUS * min(self._uses[block_id], 3)
