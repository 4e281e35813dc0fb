"""The bytes of one block of KV: one contiguous run, the same in every tier.

Axes of a block, outermost first: layer, part (K and V, or the one compressed latent of MLA), token, head,
dim. Because a block is contiguous, moving it between tiers is one copy, one read or one put.

KV may be stored in one byte a number (`stored` int8 or fp8, `model/attend/kv_format.py`). The scales of a
token then follow its numbers, so the row of a token is still one run of bytes: ``[head, dim]`` codes, up to
an even number of bytes, and ``[head, scale]`` bfloat16 scales.

A latent's rows may be cut into pieces of 16 columns (`tiled`), as kernels on tiles want them: the part of a
block is then ``[columns / 16, token, 16]``, rows filled up to whole pieces. Columns of codes are bytes, with
their scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 2
"""Scales are bfloat16."""
COLUMNS = 16
"""Columns of a piece of a tiled row; COLUMNS of native/kv_format.h."""

_STATE_ALIGNMENT = 64
"""Bytes: states begin at multiples."""

StoredAs = Literal["plain", "int8", "fp8"]
"""Numbers of KV in a block: as they were computed, or codes of one byte with a scale."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """The state of one recurrent layer for a sequence of any length, as float32."""

    layer: int
    name: str
    """``conv``: the inputs that a short convolution still needs; ``recurrent``: the matrix."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence."""
        return math.prod(self.shape) * DTYPE_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state of one sequence: its parts, one behind the other."""

    parts: tuple[StatePart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence."""
        return sum(part.num_bytes for part in self.parts)

    def offsets(self) -> dict[tuple[int, str], int]:
        """Return where each part begins, in bytes, by layer and name."""
        ends = accumulate((part.num_bytes for part in self.parts), initial=0)
        return {(part.layer, part.name): start for part, start in zip(self.parts, ends, strict=False)}


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Layers that attend to a window of tokens; their KV lies in pages of its own, a block of tokens each."""

    layers: tuple[int, ...]
    """Their numbers among the layers with KV, ascending."""
    window: int
    """Tokens: the largest."""
    num_kv_heads: int
    head_dim: int
    is_chunked: bool = False
    """Whether the window of a token begins at the last multiple of `window`, not `window` tokens back."""

    @classmethod
    def of(
        cls, sights: Sequence[tuple[int | None, int | None]], shapes: Sequence[tuple[int, int]]
    ) -> WindowGroup | None:
        """Return the group that a model's layers form; None: there is none.

        `sights` (window and chunk, None: the layer sees all tokens) and `shapes` (KV heads, head dim) of each
        layer with KV. Where some slide and others see chunks, all of them keep the longest window.
        Where all slide, the first one stays in blocks: tokens have blocks of some size then, like in any
        other model, for a small share of what pages save.
        """
        layers = tuple(number for number, (window, chunk) in enumerate(sights) if window or chunk)
        if len(layers) == len(sights):
            layers = layers[1:]
        if not layers:
            return None
        seen = {sights[number] for number in layers}
        longest = max(window or chunk or 0 for window, chunk in seen)
        is_chunked = len(seen) == 1 and not seen.pop()[0]
        return cls(layers, longest, *shapes[layers[0]], is_chunked=is_chunked)

    def first_seen(self, position: int) -> int:
        """Return the first token that one at `position` or later may see, or the one before `position`.

        So a checkpoint at the beginning of a chunk, behind which nothing is seen, holds a page, as all do.
        """
        if self.is_chunked:
            return max(0, min(position // self.window * self.window, position - 1))
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class CompressedLayer:
    """What a layer that compresses its KV keeps, in numbers of the model's dtype."""

    row_dim: int
    """Of a token's row, which lies in a page: what its window sees, and what entries are made of."""
    rate: int = 0
    """Tokens of an entry, which lies in the block of its last token; 0: the layer makes none."""
    entry_dim: int = 0

    @property
    def row_width(self) -> int:
        """Numbers that a row takes."""
        return -(-self.row_dim // COLUMNS) * COLUMNS

    @property
    def entry_width(self) -> int:
        """Numbers that an entry takes."""
        return -(-self.entry_dim // COLUMNS) * COLUMNS


@dataclass(frozen=True, slots=True)
class CompressedLayout:
    """Where layers that compress keep rows and entries: all layers side by side in a page, and in a block.

    Entry w of a sequence stands for its tokens [w * rate, (w + 1) * rate).
    """

    layers: tuple[CompressedLayer, ...]

    @property
    def unit(self) -> int:
        """Numbers that all rows, entries and blocks are multiples of."""
        return math.gcd(*(width for one in self.layers for width in (one.row_width, one.entry_width)))

    @property
    def row_dim(self) -> int:
        """Numbers of a token in a page."""
        return self.row_start(len(self.layers))

    def row_start(self, layer: int) -> int:
        """Return where a layer's row begins within a token's numbers in a page."""
        return sum(one.row_width for one in self.layers[:layer])

    def entry_start(self, layer: int, block_size: int) -> int:
        """Return where a layer's entries begin within a block's numbers."""
        return sum(-(-block_size // one.rate) * one.entry_width for one in self.layers[:layer] if one.rate)

    def block_dim(self, block_size: int) -> int:
        """Return numbers of a block for each of its tokens."""
        total = max(1, self.entry_start(len(self.layers), block_size))
        return -(-total // (block_size * self.unit)) * self.unit

    def describe(self) -> str:
        """Return a text that differs between any two of different sizes."""
        return ",".join(f"{one.row_dim}+{one.entry_dim}/{one.rate}" for one in self.layers)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of a block."""

    num_layers: int
    num_parts: int
    """2 for K and V; 1 for a latent that serves as both."""
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Name of the torch dtype in which KV is computed and attention reads it, e.g. ``bfloat16``."""
    stored: StoredAs = "plain"
    latent_rank: int = 0
    """For stored codes of a latent: its first dims, which have a scale of their own. 0: one scale for all."""
    tiled: bool = False
    """Rows lie in pieces of 16 columns, [columns / 16, token, 16]. One KV head only."""
    state: StateLayout | None = None
    """The state that recurrent layers keep of a sequence; None: there are none."""
    windows: WindowGroup | None = None
    """Layers that lie in pages, beside the `num_layers` in blocks; None: all lie in blocks."""
    compressed: CompressedLayout | None = None
    """How the one layer in blocks, and the one in pages, are shared by the model's layers, which compress;
    None: they don't."""

    @property
    def page(self) -> KVLayout:
        """The layout of a page."""
        assert self.windows is not None
        return replace(
            self,
            num_layers=len(self.windows.layers),
            num_kv_heads=self.windows.num_kv_heads,
            head_dim=self.windows.head_dim,
            state=None,
            windows=None,
            compressed=None,
        )

    def of_tokens(self) -> KVLayout:
        """Return the layout of blocks of one token."""
        dim = self.head_dim if self.compressed is None else self.compressed.block_dim(1)
        return replace(self, block_size=1, head_dim=dim)

    @property
    def blocks_per_page(self) -> int:
        """Blocks that take a page; 0: there are none."""
        if self.windows is None:
            return 0
        return self.aligned(-(-self.page.block_bytes // self.block_bytes))

    def place_of(self, layer: int) -> tuple[bool, int]:
        """Return whether a layer with KV lies in pages, and its number there or in blocks."""
        if self.windows is None:
            return False, layer
        if layer in self.windows.layers:
            return True, self.windows.layers.index(layer)
        return False, layer - sum(other < layer for other in self.windows.layers)

    @property
    def blocks_per_state(self) -> int:
        """Blocks that take one sequence's state, up to an address that suits floats. 0: no states."""
        if self.state is None:
            return 0
        return self.aligned(-(-self.state.num_bytes // self.block_bytes))

    @property
    def blocks_per_slab(self) -> int:
        """Blocks of the least slab that holds a state, a page, or whole pages; 0: there are neither."""
        state, page = self.blocks_per_state, self.blocks_per_page
        return -(-state // page) * page if state and page else max(state, page)

    def places_per_slab(self, slab: int) -> tuple[int, int]:
        """Return how many states, and how many pages, a slab of so many blocks holds; 0: there are none."""
        state, page = self.blocks_per_state, self.blocks_per_page
        return slab // state if state else 0, slab // page if page else 0

    def aligned(self, num_blocks: int) -> int:
        """Return the next number of blocks behind which a state or page may begin; without any, the same."""
        if self.state is None and self.windows is None:
            return num_blocks
        together = _STATE_ALIGNMENT // math.gcd(_STATE_ALIGNMENT, self.block_bytes)
        return -(-num_blocks // together) * together

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, num_parts, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, self.num_parts, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def num_scales(self) -> int:
        """Scales of one token and KV head in one part."""
        if self.stored == "plain":
            return 0
        return 2 if self.latent_rank else 1

    @property
    def scale_offset(self) -> int:
        """Bytes of a token's numbers in one part of a layer; its scales, if any, follow there."""
        num_bytes = self.num_kv_heads * self.head_dim
        if self.stored == "plain":
            return num_bytes * DTYPE_BYTES[self.dtype]
        return num_bytes + num_bytes % SCALE_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one part of a layer."""
        num_bytes = self.scale_offset + self.num_kv_heads * self.num_scales * SCALE_BYTES
        return -(-num_bytes // self.piece_bytes) * self.piece_bytes if self.tiled else num_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of a token that lie in one run in a tiled part."""
        return COLUMNS * (DTYPE_BYTES[self.dtype] if self.stored == "plain" else 1)

    @property
    def column_stride(self) -> int:
        """From 16 columns of a token to the next 16, in elements (of codes: bytes)."""
        return self.block_size * COLUMNS if self.tiled else COLUMNS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token, over all layers."""
        return self.num_layers * self.num_parts * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size

    def describe(self) -> str:
        """Return a text that differs between any two layouts whose bytes aren't interchangeable."""
        shape = "x".join(str(n) for n in self.block_shape)
        axes = f"layer,part,dim/{COLUMNS},token,{COLUMNS}" if self.tiled else "layer,part,token,head,dim"
        plain = f"{axes}:{shape}:{self.dtype}"
        if self.state is not None:
            parts = ",".join(
                f"{part.layer}.{part.name}{list(part.shape)}" for part in self.state.parts
            ).replace(" ", "")
            plain += f":states {parts}"
        if self.windows is not None:
            group = self.windows
            shape = f"{group.num_kv_heads}x{group.head_dim}"
            kind = "chunks" if group.is_chunked else "windows"
            plain += f":{kind} of {group.window} in layers {group.layers} of {shape}".replace(" ", "_")
        if self.compressed is not None:
            plain += f":rows and entries {self.compressed.describe()}".replace(" ", "_")
        if self.stored == "plain":
            return plain
        return f"{plain}:{self.stored},{self.num_scales} bfloat16 scales a head behind each token"
