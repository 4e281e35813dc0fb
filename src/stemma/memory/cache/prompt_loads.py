"""Loads of one prompt from the tiers below the device: which keys to ask for, the load, its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stemma.errors import StorageError
from stemma.memory.cache.lease import Lease, PendingLoad
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.lower import LowerTiers
from stemma.prefix.explain import Miss, load_passed_over
from stemma.prefix.image_ids import told_apart
from stemma.prefix.index import Match
from stemma.prefix.keys import KeySpace, Namespace, owner_tag, partial_key
from stemma.types import BlockKey, Tier, TokenArray


class PromptLoads:
    """Asks the lower tiers for the blocks of a prompt that the device lacks. Not thread-safe."""

    def __init__(self, lower: LowerTiers, key_space: KeySpace, *, takes_tails: bool) -> None:
        """`takes_tails`: also ask for the block of the last token, which a prefill server publishes."""
        self._lower = lower
        self._key_space = key_space
        self._block_size = key_space.block_size
        self._takes_tails = takes_tails

    def match(
        self, lease: Lease, found: Match, *, is_worth: bool = True
    ) -> tuple[tuple[Tier, ...], list[BlockKey]]:
        """Return the tiers of the leading blocks that lower tiers have beyond `found`, and all keys tried.

        Only of those that are worth loading by themselves; without `is_worth`, of all.
        """
        last = (lease.num_tokens - 1) // self._block_size
        keys = [lease.key(i) for i in range(found.num_full_blocks(self._block_size), last)]
        keys += self._tail_key(lease.key_before(last), lease.tokens, found)
        tiers = tuple(self._lower.match(keys) if is_worth else self._lower.held(keys))
        return tiers[: self._told_apart(lease, found.num_full_blocks(self._block_size), len(tiers))], keys

    def prefetch(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        found: Match,
        pieces_of: Callable[[Sequence[BlockKey]], Sequence[BlockKey]] = lambda _keys: (),
    ) -> Prefetch | None:
        """Let the lower tiers look for the blocks of a queued prompt beyond `found` on the device.

        `pieces_of` takes the keys of its full blocks; returns those of checkpoints to look for too.
        """
        wanted = tokens[: (len(tokens) - 1) // self._block_size * self._block_size]
        roots = self._key_space.roots(namespace)
        keys = roots.chain(wanted)
        pieces = pieces_of(keys)
        keys += self._tail_key(roots.before(len(keys), keys[-1] if keys else roots.first), tokens, found)
        num_full = found.num_full_blocks(self._block_size)
        parent = roots.before(num_full, keys[num_full - 1] if num_full else roots.first)
        owner = owner_tag(namespace.owner)
        owners = ["" if i < roots.num_public else owner for i in range(num_full, len(keys))]
        owners += [owner] * len(pieces)
        return self._lower.prefetch(parent, [*keys[num_full:], *pieces], owners)

    def passed_over(self, lease: Lease, num_held: int) -> Miss | None:
        """Return why blocks after the first `num_held` are not loaded though lower tiers have them, if so."""
        last = (lease.num_tokens - 1) // self._block_size
        if num_held >= last or self._lower.passed_over([lease.key(num_held)]) is None:
            return None
        left = self._lower.passed_over([lease.key(i) for i in range(num_held, last)])
        if left is None:
            return None
        return load_passed_over(
            left.num_blocks, left.tier, num_held * self._block_size, is_awaited=left.is_awaited
        )

    def start(
        self,
        lease: Lease,
        first: int,
        tiers: tuple[Tier, ...],
        keys: Sequence[BlockKey],
        state: Sequence[int] = (),
        num_spared: int | None = None,
        num_lost: int = 0,
    ) -> None:
        """Load what `match` found, one block for each of `tiers`, into the lease's table from `first` on.

        `state`: blocks for a recurrent state, whose keys follow those of the table's blocks. `num_spared`:
        see `LowerTiers.load`; `num_lost`: blocks that a load before this one didn't bring.
        """
        lease.adopt(first, self._lower.notes(keys[: len(tiers)]))
        block_ids = [*lease.block_table[first : first + len(tiers)].tolist(), *state]
        wanted = keys[: len(block_ids)]
        if lease.is_ahead:
            future, stop = self._lower.load_ahead(wanted, block_ids)
            lease.pending = PendingLoad(first, tiers, future, len(state), num_lost, stop)
        else:
            future = self._lower.load(wanted, block_ids, num_spared)
            lease.pending = PendingLoad(first, tiers, future, len(state), num_lost)

    def finish(self, lease: Lease) -> int:
        """Record the result of a finished load on the lease; return how many leading blocks have KV.

        A StorageError is kept as `lease.load_error`; any other error of the load is raised.
        """
        pending, lease.pending = lease.pending, None
        assert pending is not None
        assert pending.num_loaded.done()
        num_loaded = 0
        if not pending.num_loaded.cancelled():
            error = pending.num_loaded.exception()
            if error is None:
                num_loaded = pending.num_loaded.result()
            elif isinstance(error, StorageError):
                lease.load_error = str(error)
            else:
                raise error
        if pending.num_state_blocks:
            lease.has_loaded_state = num_loaded == len(pending.tiers) + pending.num_state_blocks
            num_loaded = min(num_loaded, len(pending.tiers))
        num_loaded = self._told_apart(lease, pending.first, num_loaded)
        if Tier.POOL in pending.tiers:  # which tells it with the bytes
            end = min(pending.first + num_loaded, lease.num_tokens // self._block_size)
            lease.adopt(pending.first, self._lower.notes([lease.key(i) for i in range(pending.first, end)]))
        for number, tier in enumerate(pending.tiers[:num_loaded], pending.first):
            # The last token is always computed, even where its block was loaded.
            num_tokens = min(self._block_size, lease.num_tokens - 1 - number * self._block_size)
            lease.cached_by_tier[tier] = lease.cached_by_tier.get(tier, 0) + num_tokens
        return pending.first + num_loaded

    def _told_apart(self, lease: Lease, first: int, num_blocks: int) -> int:
        """Return how many of the blocks from `first` on are surely of the same images (`told_apart`)."""
        end = (first + num_blocks) * self._block_size
        if end >= lease.num_tokens or told_apart(lease.tokens, end) == end:
            return num_blocks
        return max(0, told_apart(lease.tokens, end) // self._block_size - first)

    def _tail_key(self, parent: BlockKey, tokens: TokenArray, found: Match) -> list[BlockKey]:
        """Return the key of the block of the prompt's last token, as a prefill server publishes it.

        Empty if we don't ask for such blocks, or if the device has all of it but the last token.
        """
        tail = tokens[(len(tokens) - 1) // self._block_size * self._block_size :]
        if not self._takes_tails or len(tail) < 2 or found.num_tokens >= len(tokens) - 1:
            return []
        return [partial_key(parent, tail)]
