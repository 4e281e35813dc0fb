"""What the checkpoints of each owner take of the memory that they share with blocks, and which goes first.

An owner's quota counts blocks; a state or a page counts as its share of a slab. A page that several
checkpoints of one owner hold counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stemma.types import BlockKey


@dataclass(slots=True)
class _Held:
    keys: dict[BlockKey, None] = field(default_factory=dict)
    """Checkpoints, the longest unused first."""
    num_states: int = 0
    pages: Counter[int] = field(default_factory=Counter)


class Charges:
    """The checkpoints of each owner. Every method but `first` is O(pages of a checkpoint)."""

    def __init__(self, slab: int, states_per_slab: int, pages_per_slab: int) -> None:
        """`slab`: blocks of one; places of a kind in it, 0: there are none."""
        self._slab, self._states_per_slab, self._pages_per_slab = slab, states_per_slab, pages_per_slab
        self._of: dict[str, _Held] = {}

    def enter(self, owner: str, key: BlockKey, state: int | None, pages: Sequence[int]) -> None:
        """Count a checkpoint to its owner."""
        held = self._of.setdefault(owner, _Held())
        held.keys[key] = None
        held.num_states += state is not None
        held.pages.update(pages)

    def use(self, owner: str, key: BlockKey) -> None:
        """Note a use."""
        keys = self._of[owner].keys
        keys[key] = keys.pop(key)

    def leave(self, owner: str, key: BlockKey, state: int | None, pages: Sequence[int]) -> None:
        """Count it no more."""
        held = self._of[owner]
        del held.keys[key]
        held.num_states -= state is not None
        for page in pages:
            held.pages[page] -= 1
            if not held.pages[page]:
                del held.pages[page]
        if not held.keys:
            del self._of[owner]

    def num_blocks(self, owner: str) -> int:
        """Return for how many blocks there would be room instead, rounded up."""
        held = self._of.get(owner)
        return 0 if held is None else self.cost(held.num_states, len(held.pages))

    def cost(self, num_states: int, num_pages: int) -> int:
        """Return for how many blocks there would be room instead of these, rounded up."""
        states = -(-num_states * self._slab // max(1, self._states_per_slab))
        return states - (-num_pages * self._slab // max(1, self._pages_per_slab))

    @property
    def owners(self) -> set[str]:
        """Owners of checkpoints."""
        return set(self._of)

    def first(self, owner: str, may_leave: Callable[[BlockKey], bool]) -> BlockKey | None:
        """Return what an owner used the longest ago of all that `may_leave`. O(those that may not)."""
        held = self._of.get(owner)
        return None if held is None else next(filter(may_leave, held.keys), None)
