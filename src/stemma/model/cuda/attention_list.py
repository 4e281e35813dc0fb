"""The list that `listed_kernels` works off, built on the host with numpy: no loop over tiles.

An item is six int32: where its queries' rows stand in the step's numbers, how many they are, where the block
table stands, the first piece and the end of its pieces, and the place of its sums, -1 if it isn't cut. The
longest item comes first, and programs take items in turn, so they end at about the same time. A tile is cut
into an item for each piece if it alone would take a large part of a program's share of the step. Whether it
is cut changes no bit, only who joins the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.model.attend.attention import Sight
from stemma.model.attend.shared_prefix import PrefixGroup

ITEM, JOIN = 6, 7
"""Numbers of an item, and of an entry of the list of tokens whose pieces are joined."""
_SHARES = 4
"""A tile is cut if it is longer than this part of a program's share."""
_ROOM_BYTES, _MOST_PIECES = 64 << 20, 16_384
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
        """Rows of pieces for which there is room, one for each head of each query."""
        return self.num_heads * min(_MOST_PIECES, _ROOM_BYTES // (4 * self.num_heads * (self.value_dim + 2)))


@dataclass(frozen=True, slots=True)
class ListedRows:
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
    """[m, JOIN]: row; then twice, for pieces of a group's tiles and of its own: the place of the first one,
    their number, queries of the tile. Padding has no pieces."""
    firsts: Ints
    """[T]: the first key that each query sees; empty if that is 0 for all."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """[n] each: first those of all sequences in order, then those of groups."""

    first: Ints
    """Where their rows stand, from `order_at` on."""
    count: Ints
    """Queries."""
    table_at: Ints
    low: Ints
    """The first piece."""
    high: Ints
    """The end of the pieces."""
    end_key: Ints
    in_group: npt.NDArray[np.bool_]
    """Whether it is a group's, or a member's own: all these are cut."""


def make_list(shape: ListShape, rows: ListedRows, num_programs: int) -> AttentionList:
    """Build the list of a batch for `num_programs` programs."""
    firsts = np.empty(0, dtype=np.int32)
    if not shape.sight.is_whole:
        firsts = shape.sight.first(rows.seen[: rows.starts[-1]] - 1).astype(np.int32)
    tiles = _tiles(shape, rows, firsts)
    is_cut, place = _cut(shape, tiles, num_programs)
    return AttentionList(
        _items(shape, rows, tiles, is_cut, place), _joins(shape, rows, tiles, is_cut, place), firsts
    )


def _tiles(shape: ListShape, rows: ListedRows, firsts: Ints) -> _Tiles:
    starts, size = rows.starts, shape.queries
    shared = _shared_pieces(shape, rows)
    per_seq = -(-np.diff(starts) // size)
    seq = np.repeat(np.arange(len(per_seq)), per_seq)
    first = starts[seq] + _numbers(per_seq) * size
    count = np.minimum(size, starts[seq + 1] - first)
    end_key = rows.lens[seq] - starts[seq + 1] + first + count
    low = firsts[first] // shape.piece if len(firsts) else shared[seq]
    high = -(-end_key // shape.piece)
    own = _Tiles(first, count, rows.tables_at[seq], low, high, end_key, shared[seq] > 0)
    if not shared.any():
        return own
    at = rows.num_rows
    found = [own]
    for group in rows.groups:
        found.append(_group_tiles(shape, at, group, int(shared[group.members[0]]), rows))
        at += len(group.members)
    return _Tiles(*(np.concatenate([getattr(one, name) for one in found]) for name in _Tiles.__slots__))


def _shared_pieces(shape: ListShape, rows: ListedRows) -> Ints:
    """Return how many whole pieces each sequence leaves to its group, [S]."""
    shared = np.zeros(len(rows.lens), dtype=np.int32)
    if not rows.groups or not shape.sight.is_whole:
        return shared
    for group in rows.groups:
        shared[list(group.members)] = group.num_blocks * rows.block_size // shape.piece
    # All pieces of members need places; if there are too few, each reads the prefix itself.
    needed = (-(-rows.lens // shape.piece))[shared > 0].sum() * shape.num_heads
    return shared if needed <= shape.num_places else np.zeros_like(shared)


def _group_tiles(shape: ListShape, at: int, group: PrefixGroup, num_pieces: int, rows: ListedRows) -> _Tiles:
    """Return the tiles of a group's members, whose rows stand from `at` on."""
    number = np.arange(0, len(group.members), shape.queries, dtype=np.int32)
    same = np.ones_like(number)
    return _Tiles(
        first=at + number,
        count=np.minimum(shape.queries, len(group.members) - number),
        table_at=same * rows.tables_at[group.members[0]],
        low=0 * same,
        high=same * num_pieces,
        end_key=same * num_pieces * shape.piece,
        in_group=same > 0,
    )


def _cut(shape: ListShape, tiles: _Tiles, num_programs: int) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Return which tiles are cut, and the places of their first pieces."""
    length = tiles.high - tiles.low
    is_cut = (length > 1) & (length * _SHARES * num_programs > length.sum() * shape.units) | tiles.in_group
    taken = np.where(is_cut, length * tiles.count * shape.num_heads, 0)
    order = np.lexsort((-length, ~tiles.in_group))  # for those of groups there is room
    place = np.empty_like(taken)
    place[order] = np.cumsum(taken[order]) - taken[order]
    return is_cut & (place + taken <= shape.num_places), place


def _items(
    shape: ListShape, rows: ListedRows, tiles: _Tiles, is_cut: npt.NDArray[np.bool_], place: Ints
) -> Ints:
    """Return the items of all tiles, the longest first."""
    per_tile = np.where(is_cut, tiles.high - tiles.low, 1)
    tile, number = np.repeat(np.arange(len(per_tile)), per_tile), _numbers(per_tile)
    begin, cut = tiles.low[tile] + number, is_cut[tile]
    end = np.where(cut, begin + 1, tiles.high[tile])
    items = np.empty((len(tile), ITEM), dtype=np.int32)
    items[:, 0] = rows.order_at + tiles.first[tile]
    items[:, 1] = tiles.count[tile]
    items[:, 2] = tiles.table_at[tile]
    items[:, 3], items[:, 4] = begin, end
    items[:, 5] = np.where(cut, place[tile] + number * tiles.count[tile] * shape.num_heads, -1)
    num_keys = np.minimum(end * shape.piece, tiles.end_key[tile]) - begin * shape.piece
    return items[np.argsort(-num_keys, kind="stable")]


def _joins(
    shape: ListShape, rows: ListedRows, tiles: _Tiles, is_cut: npt.NDArray[np.bool_], place: Ints
) -> Ints:
    """Return the tokens whose pieces are joined, and the padding."""
    num_tokens, num_padding = int(rows.starts[-1]), rows.num_rows - int(rows.starts[-1])
    tile, number = np.repeat(np.arange(len(tiles.count)), tiles.count), _numbers(tiles.count)
    parts = np.empty((len(tile), 3), dtype=np.int32)
    parts[:, 0] = place[tile] + number * shape.heads
    parts[:, 1] = (tiles.high - tiles.low)[tile]
    parts[:, 2] = tiles.count[tile]
    joined = np.flatnonzero(is_cut[tile[:num_tokens]])
    joins = np.zeros((len(joined) + num_padding, JOIN), dtype=np.int32)
    joins[:, 0] = np.concatenate([joined, np.arange(num_tokens, rows.num_rows)])
    joins[: len(joined), 4:] = parts[joined]
    if len(parts) > num_tokens:  # behind the tokens stand members of groups
        joins[np.searchsorted(joined, rows.members), 1:4] = parts[num_tokens:]
    return joins


def _numbers(counts: Ints) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... for each of `counts`, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
