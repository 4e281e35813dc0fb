"""A lease: what one sequence holds of the KV cache while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.memory.tiers.device_block import BlockNotes
from stemma.prefix.eviction.policy import BlockTraits, HintedRun
from stemma.prefix.explain import Miss
from stemma.prefix.keys import KeySpace, Namespace
from stemma.types import (
    NO_HINT,
    NO_RETENTION,
    BlockIds,
    BlockKey,
    Fingerprints,
    Retention,
    RetentionHint,
    RetentionRange,
    Tier,
    TokenArray,
)

KEY_BYTES = 32
_SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """Blocks on their way up from lower tiers: ``block_table[first : first + len(tiers)]``."""

    first: int
    tiers: tuple[Tier, ...]
    """Where each block comes from."""
    num_loaded: Future[int]
    """How many leading blocks arrived; fewer than requested is a miss, not an error."""
    num_state_blocks: int = 0
    """Blocks of a recurrent state that follow them."""
    num_lost: int = 0
    """Blocks of a load before this one that didn't arrive."""
    stop: Callable[[], None] | None = None
    """Ends a load ahead of need with the blocks that have arrived."""


@dataclass(frozen=True, slots=True)
class StateMove:
    """A step's reads and writes of one sequence's state."""

    initial: int | None
    """The state before its first row; None: zeros."""
    last: int | None
    """Where the state behind its last row goes; None: the model keeps none."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """Positions inside the step, ascending, and where the states behind so many tokens go."""


class LeaseState:
    """Recurrent state and windows of one sequence that runs. Only states.py changes them."""

    __slots__ = ("branch", "checkpoint", "move", "pages", "position", "rolling", "state")

    def __init__(self, state: int | None, position: int, branch: int) -> None:
        self.state = state
        """None: zeros, before the first token."""
        self.position = position
        """Tokens that it stands for."""
        self.pages: dict[int, int] = {}
        """Of layers with windows: block number -> page, as far back as tokens from `position` on see."""
        self.branch = branch
        """Where cached KV went on without a state: the tree branches there; 0: nowhere."""
        self.checkpoint = position
        """The last checkpoint of this sequence."""
        self.rolling: BlockKey | None = None
        """The last one that was taken of its answer."""
        self.move: StateMove | None = None
        """The move of the step that is planned or runs."""


class TokenBuffer:
    """Prompt and output of one sequence. The sequence keeps it when its lease is freed.

    It begins as a view of `tokens`, which nobody changes afterwards; the first `extend` copies them.
    """

    __slots__ = ("_num_tokens", "_tokens")

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens: TokenArray = np.ascontiguousarray(tokens, dtype=np.int32)
        self._num_tokens = len(tokens)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def view(self) -> TokenArray:
        """The tokens so far; later ones are written behind them or elsewhere."""
        return self._tokens[: self._num_tokens]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add output tokens; amortised O(1) each."""
        end = self._num_tokens + len(token_ids)
        if end > len(self._tokens):
            grown: TokenArray = np.empty(2 * end + _SPARE_TOKENS, dtype=np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : end] = token_ids
        self._num_tokens = end


class Lease:
    """Tokens of a sequence and the blocks that hold their KV. Only `PrefixCache` and its parts change these.

    Ownership of the block table, as half-open intervals of its indices::

        [0, num_committed)            full blocks in the index: one reference and one pin each
        [num_committed, num_blocks)   blocks still being written: one reference each

    With the cache disabled `num_committed` stays 0.
    """

    __slots__ = (
        "_blocks",
        "_came_with",
        "_keys",
        "_leading",
        "block_size",
        "buffer",
        "cached_by_tier",
        "has_loaded_state",
        "has_retried",
        "is_ahead",
        "load_error",
        "miss",
        "namespace",
        "num_blocks",
        "num_committed",
        "num_keys",
        "pending",
        "retention",
        "roots",
        "session",
        "state",
    )

    def __init__(
        self,
        namespace: Namespace,
        key_space: KeySpace,
        tokens: TokenArray,
        retention: Retention = NO_RETENTION,
        *,
        session: int = 0,
        is_ahead: bool = False,
    ) -> None:
        """`session`: number of the conversation that the tokens are of; 0: none is named.

        `is_ahead`: nobody has asked for the tokens; blocks are loaded before the turn that may.
        """
        self.namespace = namespace
        self.session = session
        self._came_with: dict[int, int] = {}
        """Block number -> session that a loaded block was left by."""
        self.is_ahead = is_ahead
        self.roots = key_space.roots(namespace)
        self.block_size = block_size = key_space.block_size
        self.retention = retention
        self._leading = _hinted_blocks(retention.ranges, block_size)
        self.buffer = TokenBuffer(tokens)
        """The sequence that takes the lease takes this as its own; there is no other copy."""
        capacity_blocks = len(tokens) // block_size + 2
        self._blocks: BlockIds = np.empty(capacity_blocks, dtype=np.int32)
        self._keys: npt.NDArray[np.uint8] = np.empty((capacity_blocks, KEY_BYTES), dtype=np.uint8)
        self.num_blocks = 0
        self.num_committed = 0
        self.num_keys = 0
        """Leading full blocks whose keys are known."""
        self.cached_by_tier: dict[Tier, int] = {}
        self.miss: Miss | None = None
        self.pending: PendingLoad | None = None
        self.state: LeaseState | None = None
        """The sequence's state, if the model has recurrent layers (states.py)."""
        self.has_loaded_state: bool | None = None
        """Whether a load brought all of a recurrent state; None: none was to be loaded."""
        self.has_retried = False
        """Whether an earlier state was loaded after a load that brought too little."""
        self.load_error: str | None = None
        """Why a load failed, if the policy is to fail the request."""

    @property
    def tokens(self) -> TokenArray:
        """Prompt and output so far; a view."""
        return self.buffer.view

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.buffer)

    @property
    def block_table(self) -> BlockIds:
        """Logical -> physical block; a view, valid until the lease changes."""
        return self._blocks[: self.num_blocks]

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens served from any tier when the lease was made."""
        return sum(self.cached_by_tier.values())

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit in the blocks held."""
        return self.num_blocks * self.block_size

    @property
    def has_loaded(self) -> bool:
        """Whether a load from lower tiers has ended, so that `PrefixCache.finish_load` is due."""
        return self.pending is not None and self.pending.num_loaded.done()

    def append_blocks(self, block_ids: BlockIds) -> None:
        """Add blocks at the end of the table."""
        total = self.num_blocks + len(block_ids)
        if total > len(self._blocks):
            self._blocks = np.resize(self._blocks, 2 * total)
        self._blocks[self.num_blocks : total] = block_ids
        self.num_blocks = total

    def take_blocks(self, other: Lease) -> None:
        """Take over the blocks of `other`, which has none then; the tokens with KV there begin this one's."""
        self._blocks, self._keys = other._blocks, other._keys
        self.num_blocks, self.num_committed = other.num_blocks, other.num_committed
        self.num_keys = other.num_committed
        other._blocks, other._keys = other._blocks[:0], other._keys[:0]
        other.num_blocks = other.num_committed = other.num_keys = 0

    def adopt_keys(self, keys: npt.NDArray[np.uint8]) -> None:
        """Use these keys, [n, 32], of the leading blocks instead of hashing them again."""
        self._reserve_keys(len(keys))
        self._keys[: len(keys)] = keys
        self.num_keys = len(keys)

    def keys(self, num_blocks: int) -> npt.NDArray[np.uint8]:
        """Return the keys of the leading full blocks, [num_blocks, 32]; each is hashed only once."""
        if num_blocks > self.num_keys:
            size, known = self.block_size, self.num_keys
            last = self.key(known - 1) if known else self.roots.first
            new = self.roots.extend(known, last, self.tokens[known * size : num_blocks * size])
            self._reserve_keys(num_blocks)
            self._keys[self.num_keys : num_blocks] = np.frombuffer(b"".join(new), dtype=np.uint8).reshape(
                -1, KEY_BYTES
            )
            self.num_keys = num_blocks
        return self._keys[:num_blocks]

    def key(self, block: int) -> BlockKey:
        """Return the key of full block number `block` of the table."""
        return BlockKey(self.keys(block + 1)[block].tobytes())

    def key_before(self, block: int) -> BlockKey:
        """Return what block number `block` is chained to: the key of the block before it, or a root."""
        return self.roots.before(block, self.key(block - 1) if block else self.roots.first)

    def hint(self, block: int) -> RetentionHint:
        """Return the retention hint of block number `block`."""
        return next((run.hint for run in self._leading if block < run.end), self.retention.rest)

    def session_of(self, block: int) -> int:
        """Return the number of the session that leaves, or left, block number `block`; 0: none is named."""
        return 0 if block < self.roots.num_public else self._came_with.get(block, self.session)

    def adopt(self, first: int, notes: Sequence[BlockNotes]) -> None:
        """Let blocks from `first` on keep what they came with, where they came with anything."""
        self._came_with |= {n: note.session for n, note in enumerate(notes, first) if note.session}
        end, hints = first + len(notes), [note.hint for note in notes]
        if self.retention.renews or all(hint == NO_HINT for hint in hints):
            return
        own = [self.hint(block) for block in range(end)]
        own[first:] = [
            mine if hint == NO_HINT else hint for mine, hint in zip(own[first:], hints, strict=True)
        ]
        ends = [*(n for n in range(1, end) if own[n] != own[n - 1]), end]
        starts = [0, *ends[:-1]]
        runs = [HintedRun(start, stop, own[start]) for start, stop in zip(starts, ends, strict=True)]
        later = [HintedRun(max(run.start, end), run.end, run.hint) for run in self._leading if run.end > end]
        self._leading = (*runs, *later)

    def traits(
        self,
        num_full: int,
        *,
        tail: BlockKey | None = None,
        costs: npt.NDArray[np.float32] | None = None,
    ) -> BlockTraits:
        """Return what the eviction policy may know of the leading `num_full` blocks (and a partial one).

        `costs` holds the cost of a block by depth, for at least as many blocks.
        """
        prints: Fingerprints = np.empty(num_full + (tail is not None), dtype=np.uint64)
        prints[:num_full] = self.keys(num_full).view("<u8")[:, 0]
        if tail is not None:
            prints[num_full] = int.from_bytes(tail[:8], "little")
        return BlockTraits(
            fingerprints=prints,
            costs_s=None if costs is None else costs[: len(prints)],
            hint=self.retention.rest,
            leading=self._leading,
            is_use=not self.is_ahead,
            session=self.session,
            came_from=0 if self.session else self.session_of(max(self._came_with, default=0)),
        )

    def _reserve_keys(self, num_blocks: int) -> None:
        if num_blocks > len(self._keys):
            self._keys = np.resize(self._keys, (2 * num_blocks, KEY_BYTES))


def _hinted_blocks(ranges: Sequence[RetentionRange], block_size: int) -> tuple[HintedRun, ...]:
    """Return the hints of whole blocks: each takes those of the range of its first token."""
    runs: list[HintedRun] = []
    for one in ranges:
        start, end = runs[-1].end if runs else 0, -(-one.num_tokens // block_size)
        if end > start:
            runs.append(HintedRun(start, end, one.hint))
    return tuple(runs)
