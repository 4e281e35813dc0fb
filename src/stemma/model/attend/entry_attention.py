"""Attention over windows and compressed entries in paged KV (model/attend/compression.py), with torch alone.

Rows and entries are found by places: the number of units (`CompressedLayout.unit` numbers) before them in the
device tier's one tensor. So a query's keys, some in pages and some in blocks, are one list of places: first
the window's tokens, then the entries, both by rising position.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.compression import Compression

_LISTED = 1 << 22
"""Places that are listed at a time."""


class EntryAttentionStep:
    """`StepContext` of layers that compress their KV."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV) -> None:
        layout = kv.layout
        assert layout.compressed is not None
        assert batch.pages is not None
        self.layout, self.kv = layout.compressed, kv
        self.unit, self._block_size = layout.compressed.unit, layout.block_size
        self._units = kv.data.view(-1, self.unit)
        self._per_block = layout.head_dim * layout.block_size // self.unit
        self._per_page = layout.blocks_per_page * self._per_block
        self._first_page = kv.page_blocks(0).start * self._per_block
        self._blocks, self._pages = batch.block_tables.long(), batch.pages.tables.long()
        self._starts, self._context_lens = batch.query_starts, batch.context_lens
        self._positions = batch.positions
        counts = torch.tensor(batch.query_starts).diff()
        self._sequences = torch.arange(len(counts)).repeat_interleave(counts)
        self._new_rows = self._row_places(self._sequences, self._positions)
        self._windows: dict[int, torch.Tensor] = {}
        """By window: the places of the tokens that each row sees, [T, window], of the first layer."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the new tokens' rows, `key` [T, 1, row_dim], and the entries that they end; then attend."""
        how, layer = call.compression, call.layer_idx
        assert how is not None
        assert call.sliding_window is not None
        self._write(self._new_rows + self._row_start(layer), key[:, 0])
        if how.kept.rate:
            self._make_entries(layer, how)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for rows in self._slices(call.sliding_window, how):
            places, counts = self._seen(call, how, rows)
            self.attend_to(call, query[rows], places, counts, output[rows])
        return output

    def attend_to(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        places: torch.Tensor,
        counts: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend with q [n, H, D] to the first `counts` [n] of the keys at `places` [n, N], to `output`."""
        keys = self._read(places, output.shape[2]).float()
        scores = torch.einsum("nhd,nkd->nhk", query.float(), keys) * call.scaling
        is_seen = torch.arange(places.shape[1]) < counts[:, None]
        scores = scores.masked_fill(~is_seen[:, None], float("-inf"))
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.view(1, -1, 1).expand(len(query), -1, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : places.shape[1]]
        output.copy_(torch.einsum("nhk,nkd->nhd", weights, keys))

    def choose(
        self, how: Compression, rows: slice, entries: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the entries that rows of one sequence choose, [n, top_k], and how many, [n].

        `entries` [N]: places of the sequence's entries, of which each row may see the first `counts` [n].
        """
        selection = how.selection
        assert selection is not None
        assert selection.scoring is not None
        query, weights = selection.scoring.query[rows], selection.scoring.weights[rows]
        keys = self._read(entries, how.kept.entry_dim)[:, -selection.dim :].float()
        scores = torch.einsum("nh,nhc->nc", weights, torch.relu(query @ keys.T))
        is_seen = torch.arange(len(entries)) < counts[:, None]
        scores = scores.masked_fill(~is_seen, float("-inf"))
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : selection.top_k]
        chosen = torch.zeros_like(is_seen).scatter(1, order, True) & is_seen
        first = (~chosen).sort(dim=-1, stable=True).indices[:, : selection.top_k]
        return entries[first], chosen.sum(-1)

    # -- places ---------------------------------------------------------------------------------------

    def _row_start(self, layer: int) -> int:
        return self.layout.row_start(layer) // self.unit

    def _row_places(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the places of tokens' rows in the first layer."""
        pages = self._pages[sequences, positions // self._block_size]
        inside = positions % self._block_size * (self.layout.row_dim // self.unit)
        return self._first_page + pages * self._per_page + inside

    def _entry_places(self, layer: int, sequences: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the places of a layer's entries; those of entries that aren't there yet are any."""
        kept = self.layout.layers[layer]
        number = ((numbers + 1) * kept.rate - 1) // self._block_size
        before = number * self._block_size // kept.rate  # entries that end in blocks before
        blocks = self._blocks[sequences, number.clamp_max(self._blocks.shape[1] - 1)]
        start = self.layout.entry_start(layer, self._block_size) // self.unit
        return blocks * self._per_block + start + (numbers - before) * (kept.entry_width // self.unit)

    def _read(self, places: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what begins at `places` [...], as [..., dim]."""
        units = torch.arange(-(-dim // self.unit))
        return self._units[places[..., None] + units].flatten(-2)[..., :dim]

    def _write(self, places: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write `numbers` [n, dim] at `places` [n]."""
        dim = numbers.shape[1]
        units = torch.arange(-(-dim // self.unit))
        if rest := -dim % self.unit:
            numbers = torch.nn.functional.pad(numbers, (0, rest))
        self._units[places[:, None] + units] = numbers.reshape(len(places), -1, self.unit)

    # -- what rows see --------------------------------------------------------------------------------

    def _slices(self, window: int, how: Compression) -> Iterator[slice]:
        """Cut the step's rows so that what they see can be listed."""
        most = 0 if not how.kept.rate else max(self._context_lens) // how.kept.rate
        if how.selection is not None:
            most = min(most, how.selection.top_k)
        step = max(1, _LISTED // (window + most))
        for start in range(0, len(self._positions), step):
            yield slice(start, min(start + step, len(self._positions)))

    def _seen(self, call: AttentionCall, how: Compression, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of what rows see, [n, N], and how many each does, [n]."""
        window, layer = call.sliding_window or 0, call.layer_idx
        tokens = self._window(window)[rows] + self._row_start(layer)
        num_tokens = (self._positions[rows] + 1).clamp_max(window)
        if not how.kept.rate:
            return tokens, num_tokens
        entries, num_entries = self._entries(layer, how, rows)
        behind = num_tokens[:, None] + torch.arange(entries.shape[1])
        joined = tokens.new_zeros(len(tokens), window + entries.shape[1])
        joined[:, :window] = tokens
        return joined.scatter_(1, behind, entries), num_tokens + num_entries

    def _window(self, window: int) -> torch.Tensor:
        found = self._windows.get(window)
        if found is None:
            first = (self._positions - window + 1).clamp_min(0)
            seen = torch.minimum(first[:, None] + torch.arange(window), self._positions[:, None])
            found = self._windows[window] = self._row_places(self._sequences[:, None], seen)
        return found

    def _entries(self, layer: int, how: Compression, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the entries that rows see, [n, N], and how many, [n]."""
        counts = (self._positions[rows] + 1) // how.kept.rate
        most = int(counts.max())
        selection, numbers = how.selection, torch.arange(most)
        if selection is None or most <= selection.top_k:
            return self._entry_places(layer, self._sequences[rows, None], numbers), counts
        places, found = counts.new_zeros(len(counts), selection.top_k), torch.zeros_like(counts)
        sequences = self._sequences[rows]
        for sequence in torch.unique_consecutive(sequences).tolist():
            own = slice(*(sequences == sequence).nonzero()[[0, -1], 0].tolist())
            own = slice(own.start, own.stop + 1)
            most = int(counts[own].max())
            if not most:
                continue
            entries = self._entry_places(layer, torch.tensor(sequence), numbers[:most])
            of_step = slice(rows.start + own.start, rows.start + own.stop)
            chosen, found[own] = self.choose(how, of_step, entries, counts[own])
            places[own, : chosen.shape[1]] = chosen
        return places, found

    def _make_entries(self, layer: int, how: Compression) -> None:
        """Make the entries that end within the step."""
        assert how.make is not None
        rate, ends = how.kept.rate, []
        for sequence, end in enumerate(self._context_lens):
            start = end - (self._starts[sequence + 1] - self._starts[sequence])
            ends += [(sequence, number) for number in range(start // rate, end // rate)]
        if not ends:
            return
        sequences, numbers = torch.tensor(ends).unbind(1)
        tokens = ((numbers + 1) * rate - how.span)[:, None] + torch.arange(how.span)
        places = self._row_places(sequences[:, None], tokens.clamp_min(0)) + self._row_start(layer)
        entries = how.make(self._read(places, how.kept.row_dim), numbers)
        self._write(self._entry_places(layer, sequences, numbers), entries)
