"""Which rank holds and computes which tokens, and how a step is divided accordingly.

The tokens of a sequence are dealt out in runs, round robin: of a block's tokens each rank has one run, so
all ranks have a part of every block, under the same block id. A token's row is computed by the rank that
holds its KV (striped attention, arXiv:2311.09431): causal work is even, and new KV needs no sending.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.model.attend.attention import Sight
from stemma.model.attend.batch import ForwardBatch

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dealing:
    """Runs of `run` tokens on `size` ranks in turn."""

    size: int
    run: int

    @property
    def block_size(self) -> int:
        """Tokens of a block, on all ranks together."""
        return self.size * self.run

    def owners(self, positions: Integers) -> Integers:
        """Return the rank that has each position."""
        owners: Integers = positions // self.run % self.size
        return owners

    def num_held(self, rank: int, num_tokens: Integers) -> Integers:
        """Return how many of the first `num_tokens` tokens of a sequence a rank has."""
        whole, rest = np.divmod(num_tokens, self.block_size)
        held: Integers = whole * self.run + np.clip(rest - rank * self.run, 0, self.run)
        return held

    def num_held_of_block(self, rank: int, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens of one block a rank has."""
        return min(max(num_tokens - rank * self.run, 0), self.run)

    def own_slots(self, rank: int, slots: Integers) -> Integers:
        """Return where a rank has the tokens that lie in these slots of all ranks; all are its own."""
        blocks, offsets = np.divmod(slots, self.block_size)
        return blocks * self.run + offsets - rank * self.run


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Rows of a step that attend to the keys of one rank; those of a sequence follow one another.

    S sequences, T rows. A sequence whose rows come from several ranks is several here.
    """

    starts: npt.NDArray[np.int32]
    """[S + 1]."""
    positions: Integers
    """[T], in the sequence."""
    limits: npt.NDArray[np.int32]
    """[T]: keys of this rank that each row sees, from the sequence's first on."""
    num_keys: npt.NDArray[np.int32]
    """[S]: keys of this rank that any row sees."""
    tables: npt.NDArray[np.int32]
    """[S, N]: blocks."""
    rank: int
    """Whose keys."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a layer sends of a row and of a rank's part of a block."""

    row: int
    """A query on its way out, and what was found for it on its way back."""
    block: int


class DealtStep:
    """A step as one rank sees it. All ranks divide it alike."""

    def __init__(self, batch: ForwardBatch, dealing: Dealing, rank: int, sizes: Sizes) -> None:
        """Divide `batch`, which is the same on every rank.

        A sequence's rows go to the keys, or the keys to the rows, whichever is less to send
        (arXiv:2411.01783).
        """
        self._dealing, self._rank = dealing, rank
        starts = np.array(batch.query_starts, dtype=np.int64)
        counts, lens = np.diff(starts), np.array(batch.context_lens, dtype=np.int64)
        self._seqs = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(lens - counts - starts[:-1], counts)
        self._positions = first + np.arange(len(self._seqs))
        self._tables: npt.NDArray[np.int32] = batch.block_tables.numpy()
        owners = dealing.owners(self._positions)
        self.rows_of = [np.flatnonzero(owners == one) for one in range(dealing.size)]
        """By rank: its rows of the batch."""
        num_blocks = -(-lens // dealing.block_size)
        self._keys_travel = (counts > 1) & (counts * sizes.row > num_blocks * sizes.block)
        own = self.own_rows
        travels = self._keys_travel[self._seqs[own]]
        self.staying, self.sent = np.flatnonzero(travels), np.flatnonzero(~travels)
        """Of the own rows, those that wait for keys, and those that are sent to them."""
        asking = [rows[~self._keys_travel[self._seqs[rows]]] for rows in self.rows_of]
        self.num_asking = [len(rows) for rows in asking]
        """By rank: rows that it sends."""
        self.asking = self._queries(asking, rank)
        """The rows of all ranks that attend to our keys, rank by rank."""
        self.passed_blocks: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """[B]: blocks whose keys go around."""
        self.waiting: list[Queries] = []
        """By rank: our rows over its keys; blocks are counted in `passed_blocks`."""
        if self._keys_travel.any():
            self._pass_blocks(num_blocks, own[travels])

    @property
    def own_rows(self) -> Integers:
        """This rank's rows of the batch."""
        return self.rows_of[self._rank]

    def _pass_blocks(self, num_blocks: Integers, waiting: Integers) -> None:
        seqs = np.flatnonzero(self._keys_travel)
        self.passed_blocks = np.unique(
            np.concatenate([self._tables[seq, : num_blocks[seq]] for seq in seqs])
        ).astype(np.int64)
        places = np.searchsorted(self.passed_blocks, self._tables)
        tables = np.minimum(places, len(self.passed_blocks) - 1).astype(np.int32)
        self.waiting = [self._queries([waiting], one, tables) for one in range(self._dealing.size)]

    def _queries(
        self, groups: list[Integers], rank: int, tables: npt.NDArray[np.int32] | None = None
    ) -> Queries:
        """Return the rows of `groups`, each in the order of sequences, over the keys of a rank."""
        rows = np.concatenate(groups)
        places = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        keys = places * len(self._keys_travel) + self._seqs[rows]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        starts = np.append(begins, len(rows)).astype(np.int32)
        limits = self._dealing.num_held(rank, self._positions[rows] + 1).astype(np.int32)
        tables = self._tables if tables is None else tables
        return Queries(
            starts=starts,
            positions=self._positions[rows],
            limits=limits,
            num_keys=limits[starts[1:] - 1],
            tables=np.ascontiguousarray(tables[self._seqs[rows[begins]]]),
            rank=rank,
        )

    def lows(self, queries: Queries, sight: Sight) -> npt.NDArray[np.int32] | None:
        """Return the first key of the rank that each row sees, [T]; None: all see from its first on."""
        if sight.is_whole:
            return None
        return self._dealing.num_held(queries.rank, sight.first(queries.positions)).astype(np.int32)
