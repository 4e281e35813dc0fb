"""One step's flattened batch: what the attention function needs in addition to q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from stemma.model.lora.adapter import AdapterRows


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Where the recurrent states of a step's S sequences lie in the device's states."""

    initial: tuple[int | None, ...]
    """[S]: before the first row; None: zeros."""
    last: tuple[int, ...]
    """[S]: where the state behind the last row goes."""
    snapshots: tuple[tuple[int, int], ...]
    """Rows, ascending, behind which states are kept, and where."""


@dataclass(frozen=True, slots=True)
class PageTables:
    """Where layers with windows write and find KV: in pages, of which each is a block of tokens."""

    slots: torch.Tensor
    """[T] int64: as `ForwardBatch.slots`, of pages."""
    tables: torch.Tensor
    """[S, max_blocks] int32, on CPU: as `ForwardBatch.block_tables`; 0 for what no token sees."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What a step reads of images in place of tokens."""

    rows: torch.Tensor
    """[E] int64: the rows of the batch that are placeholders."""
    vectors: torch.Tensor
    """[E, H] in the model's dtype: what the vision encoder made of them."""
    features: torch.Tensor | None = None
    """[F, E, H]: what is added to their hidden states behind each of the first F layers; None: nothing is."""

    def on(self, device: torch.device) -> ImageRows:
        """Return them on a device, without waiting for it."""
        rows, vectors = (each.to(device, non_blocking=True) for each in (self.rows, self.vectors))
        features = self.features
        return ImageRows(rows, vectors, None if features is None else features.to(device, non_blocking=True))

    def add_features(self, hidden: torch.Tensor, layer: int) -> bool:
        """Add those of a layer to the hidden states [T, H] behind it, in place; False: it has none."""
        if self.features is None or not 0 <= layer < len(self.features):
            return False
        changed = hidden.index_select(0, self.rows) + self.features[layer]
        hidden.index_copy_(0, self.rows, changed)
        return True


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of S sequences, flattened; sequence s owns rows ``query_starts[s]:query_starts[s + 1]``.

    A decode is a sequence with one query token; a prefill chunk has more. The KV of the T tokens is
    written before attention reads, so `context_lens` counts them.
    """

    token_ids: torch.Tensor
    """[T] int64, on the model's device."""
    positions: torch.Tensor
    """[T] int64."""
    slots: torch.Tensor
    """[T] int64: ``block_id * block_size + offset``, where each token's KV is written."""
    query_starts: list[int]
    """S + 1 entries."""
    context_lens: list[int]
    """S entries: tokens of the sequence that have KV after this step has written its own."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32, on CPU; rows padded with 0."""
    logits_rows: torch.Tensor
    """[L] int64: rows that need logits."""
    adapters: tuple[AdapterRows, ...] = ()
    """Rows that adapters serve, in order of rows; the others get the base model."""
    written_rows: torch.Tensor | None = None
    """[W] int64: rows whose KV is written; None: all. The KV of the others is in their slots already."""
    previous_hidden: torch.Tensor | None = None
    """[S, H]: for the layer of `model/load/prediction.py`, the model's last hidden state of the token before
    each sequence's first row. None: every sequence begins in this batch."""

    states: StateMoves | None = None
    """None: the model has no recurrent layers."""
    pages: PageTables | None = None
    """None: all KV lies in blocks."""

    images: ImageRows | None = None
    """None: no row is an image's placeholder."""
    limits: torch.Tensor | None = None
    """[T] int32, on CPU: tokens of its sequence that each row sees, rising within a sequence; beside an image
    whose tokens see each other both ways. None: all up to its own."""
    axes: torch.Tensor | None = None
    """[3, T] int64: positions along time, height and width, for models whose angles have three axes. None:
    `positions` on all three, as without images."""

    wants_hidden: bool = False
    """Whether decoders set `hidden`."""
    hidden: torch.Tensor | None = None
    """[T, H] in the model's dtype: what the step found as hidden states behind the final norm."""

    on_launch: Callable[[], None] = _nothing
    """Decoders call it once they are about to compute outside Python: from then on the step leaves the
    interpreter to other threads. Those that compute in one native call do so right before it."""

    def in_pages(self) -> ForwardBatch:
        """Return the batch as layers with windows see it, whose blocks are the pages."""
        assert self.pages is not None
        return replace(self, slots=self.pages.slots, block_tables=self.pages.tables, pages=None)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.context_lens)
