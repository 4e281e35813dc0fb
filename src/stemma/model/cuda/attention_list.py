"""The list that `listed_kernels` works off, built on the host with numpy: no loop over tiles.

An item is six int32: where its queries' rows stand in the step's numbers, how many they are, where the block
table stands, the first piece and the end of its pieces, and whether the tile is cut. The longest item comes
first, and programs take items in turn, so they end at about the same time. A tile is cut into an item for
each piece if it alone would take a large part of a program's share of the step. Whether it is cut changes no
bit, only who joins the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.model.attend.attention import Sight
from stemma.model.attend.shared_prefix import PrefixGroup

ITEM, JOIN = 6, 3
"""Numbers of an item, and of an entry of the list of tokens whose pieces are joined."""
_SHARES = 4
"""A tile is cut if it is longer than this part of a program's share."""
_ROOM_BYTES, _MOST_PLACES = 64 << 20, 16_384
"""Room for pieces of tiles that are cut; beyond it tiles aren't cut."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ListShape:
    """What a list depends on beside the batch; layers that agree in it share a list."""

    num_heads: int
    num_kv_heads: int
    value_dim: int
    block_m: int
    """Rows of a tile: queries times heads of a unit."""
    piece: int
    """Keys of a piece."""
    sight: Sight

    @property
    def heads(self) -> int:
        """Query heads of a unit: all that share a KV head, or as many of them as a tile holds."""
        group = self.num_heads // self.num_kv_heads
        return next(heads for heads in range(min(group, self.block_m), 0, -1) if group % heads == 0)

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.block_m // self.heads

    @property
    def units(self) -> int:
        """Head units of an item."""
        return self.num_heads // self.heads

    @property
    def num_places(self) -> int:
        """Pairs of a query and a piece for which there is room."""
        return min(_MOST_PLACES, _ROOM_BYTES // (4 * self.num_heads * (self.value_dim + 2)))


@dataclass(frozen=True, slots=True)
class StepRows:
    """A batch as lists are built of it: T queries of S sequences, `num_rows` rows with the padding."""

    starts: Ints
    """[S + 1]."""
    lens: Ints
    """[S]: keys that each sequence's last query sees."""
    tables_at: Ints
    """[S]: where the block tables stand."""
    order_at: int
    """Where the numbers of all rows stand, and behind them those of `members`."""
    num_rows: int
    groups: Sequence[PrefixGroup]
    """Decodes that share blocks, in the order of `members`."""
    block_size: int

    @property
    def members(self) -> Ints:
        """The rows of all groups' members, group after group."""
        seqs = [seq for group in self.groups for seq in group.members]
        return self.starts[np.array(seqs, dtype=np.int64)]

    @property
    def seen(self) -> Ints:
        """[num_rows]: keys that each row sees, as if there were no window; 0 for padding."""
        seen = np.zeros(self.num_rows, dtype=np.int32)
        counts = np.diff(self.starts)
        num_queries = int(self.starts[-1])
        seen[:num_queries] = np.arange(1, num_queries + 1) + np.repeat(self.lens - self.starts[1:], counts)
        return seen


@dataclass(frozen=True, slots=True)
class AttentionList:
    """What the kernels read for one `ListShape`, int32."""

    items: Ints
    """[n, ITEM]."""
    joins: Ints
    """[m, JOIN]: row, the place of its first piece, number of pieces; padding has none."""
    places: Ints
    """[T]: place of piece 0 of each query of a tile that is cut, which may be negative."""
    firsts: Ints
    """[T]: the first key that each query sees; empty if that is 0 for all."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles, in order of their rows: [n] each."""

    first: Ints
    count: Ints
    seq: Ints
    end_key: Ints
    low: Ints
    """The first piece of the tile's own items."""
    high: Ints
    shared: Ints
    """Pieces before `low` that items of its group attend to."""


def make_list(shape: ListShape, rows: StepRows, num_programs: int) -> AttentionList:
    """Build the list of a batch for `num_programs` programs."""
    firsts = np.empty(0, dtype=np.int32)
    if not shape.sight.is_whole:
        firsts = shape.sight.first(rows.seen[: rows.starts[-1]] - 1).astype(np.int32)
    shared = _shared_pieces(shape, rows)
    tiles = _tiles(shape, rows, firsts, shared)
    is_cut, base = _cut(shape, tiles, num_programs)
    span, origin = tiles.high - tiles.low + tiles.shared, tiles.low - tiles.shared
    tile = np.repeat(np.arange(len(tiles.first)), tiles.count)
    place = base[tile] + (np.arange(len(tile)) - tiles.first[tile]) * span[tile]
    joined = np.flatnonzero(is_cut[tile])
    padding = np.arange(len(tile), rows.num_rows)
    joins = np.zeros((len(joined) + len(padding), JOIN), dtype=np.int32)
    joins[:, 0] = np.concatenate([joined, padding])
    joins[: len(joined), 1], joins[: len(joined), 2] = place[joined], span[tile][joined]
    items, num_keys = _items(shape, rows, tiles, is_cut)
    if shared.any():
        of_groups = _group_items(shape, rows, shared)
        items = np.concatenate([items, of_groups])
        num_keys = np.concatenate([num_keys, np.full(len(of_groups), shape.piece)])
    items = items[np.argsort(-num_keys, kind="stable")]
    return AttentionList(items, joins, (place - origin[tile]).astype(np.int32), firsts)


def _shared_pieces(shape: ListShape, rows: StepRows) -> Ints:
    """Return how many whole pieces each sequence leaves to its group, [S]."""
    shared = np.zeros(len(rows.lens), dtype=np.int32)
    if not rows.groups or not shape.sight.is_whole:
        return shared
    for group in rows.groups:
        shared[list(group.members)] = group.num_blocks * rows.block_size // shape.piece
    # All pieces of members need places; if they have none, each reads the prefix itself.
    needed = (-(-rows.lens // shape.piece))[shared > 0].sum()
    return shared if needed <= shape.num_places else np.zeros_like(shared)


def _tiles(shape: ListShape, rows: StepRows, firsts: Ints, shared: Ints) -> _Tiles:
    starts, size = rows.starts, shape.queries
    per_seq = -(-np.diff(starts) // size)
    seq = np.repeat(np.arange(len(per_seq), dtype=np.int32), per_seq)
    number = np.arange(len(seq)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
    first = starts[seq] + number * size
    count = np.minimum(size, starts[seq + 1] - first)
    end_key = rows.lens[seq] - starts[seq + 1] + first + count
    low = firsts[first] // shape.piece if len(firsts) else shared[seq]
    return _Tiles(first, count, seq, end_key, low, -(-end_key // shape.piece), shared[seq])


def _cut(shape: ListShape, tiles: _Tiles, num_programs: int) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Return which tiles are cut, and the place of the first piece of each one's first query."""
    length = tiles.high - tiles.low
    is_cut = (length > 1) & (length * _SHARES * num_programs > length.sum() * shape.units)
    is_cut |= tiles.shared > 0
    taken = np.where(is_cut, (length + tiles.shared) * tiles.count, 0)
    order = np.lexsort((-length, tiles.shared == 0))  # members of groups have room: that was checked
    base = np.empty_like(taken)
    base[order] = np.cumsum(taken[order]) - taken[order]
    return is_cut & (base + taken <= shape.num_places), base


def _items(
    shape: ListShape, rows: StepRows, tiles: _Tiles, is_cut: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """Return the items of all tiles, and how many keys each reads."""
    per_tile = np.where(is_cut, tiles.high - tiles.low, 1)
    tile = np.repeat(np.arange(len(per_tile)), per_tile)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)
    begin = tiles.low[tile] + number
    end = np.where(is_cut[tile], begin + 1, tiles.high[tile])
    items = np.empty((len(tile), ITEM), dtype=np.int32)
    items[:, 0] = rows.order_at + tiles.first[tile]
    items[:, 1] = tiles.count[tile]
    items[:, 2] = rows.tables_at[tiles.seq[tile]]
    items[:, 3], items[:, 4], items[:, 5] = begin, end, is_cut[tile]
    return items, np.minimum(end * shape.piece, tiles.end_key[tile]) - begin * shape.piece


def _group_items(shape: ListShape, rows: StepRows, shared: Ints) -> Ints:
    """Return the items of shared pieces: a tile of members each."""
    found, at = [], rows.order_at + rows.num_rows
    for group in rows.groups:
        num_pieces, size = int(shared[group.members[0]]), len(group.members)
        first = np.arange(0, size, shape.queries)
        items = np.empty((len(first) * num_pieces, ITEM), dtype=np.int32)
        items[:, 0] = np.repeat(at + first, num_pieces)
        items[:, 1] = np.repeat(np.minimum(shape.queries, size - first), num_pieces)
        items[:, 2] = rows.tables_at[group.members[0]]
        items[:, 3] = np.tile(np.arange(num_pieces), len(first))
        items[:, 4], items[:, 5] = items[:, 3] + 1, 1
        found.append(items)
        at += size
    return np.concatenate(found)
