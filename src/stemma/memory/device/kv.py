"""The device tier: one tensor that holds all blocks, block-major.

Block b is ``data[b]``, one contiguous run of ``layout.block_bytes`` bytes, so moving it to another tier is a
single copy. One layer of all blocks is therefore a strided view, which attention reads.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from stemma.errors import ConfigError
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.layout import COLUMNS, DTYPE_BYTES, KVLayout
from stemma.memory.device.uploads import Uploads

_MOST_PLACES = 2**31 - 1
"""Places are int32."""
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def num_blocks_for(layout: KVLayout, memory_bytes: int) -> int:
    """Return how many blocks fit into `memory_bytes`; raise ConfigError if not even one does."""
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has {memory_bytes} bytes but one block of {layout.block_size} tokens takes "
            f"{layout.block_bytes}; give it more memory or choose a smaller block size"
        )
    return num_blocks


class DeviceKV:
    """KV of `num_blocks` blocks, shape [num_blocks, layers, parts, block_size, heads, dim].

    If the layout stores codes, `data` is uint8 [num_blocks, layers, parts, block_size, row_bytes]. If it is
    tiled, the last axes are [columns / 16, block_size, 16].
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        num_states: int = 0,
        num_pages: int = 0,
        slab: int = 0,
    ) -> None:
        """`num_states`: sequences whose recurrent states fit, in blocks behind the others.

        `num_pages`: of layers with windows, behind these. With `slab`, blocks of a slab, both lie among the
        blocks: as many as all slabs hold, and whoever uses them says what each slab holds (`slabs.py`).
        """
        if num_blocks < 1:
            raise ConfigError(f"the device tier needs at least one block, got {num_blocks}")
        self.layout = layout
        self.num_blocks, self.slab = num_blocks, slab
        self._first_state, self._first_page = num_blocks, num_blocks + num_states * layout.blocks_per_state
        num_all = self._first_page + num_pages * layout.blocks_per_page
        if slab:
            self._first_state = self._first_page = 0
            num_states, num_pages = (num_blocks // slab * each for each in layout.places_per_slab(slab))
            num_all = num_blocks
        self.num_states, self.num_pages = num_states, num_pages
        num_blocks = num_all
        _check_places(layout, num_blocks)
        self.device = torch.device(device)
        dtype, shape = TORCH_DTYPES[layout.dtype], [num_blocks, *layout.block_shape]
        if layout.stored != "plain":
            dtype, shape = torch.uint8, [*shape[:-2], layout.row_bytes]
        num_pieces = layout.row_bytes // layout.piece_bytes if layout.tiled else 1
        if layout.tiled:
            shape = [*shape[:3], num_pieces, layout.block_size, COLUMNS]
        self.uploads = Uploads(self.device)
        self._token_rows: npt.NDArray[np.uint8] | None = None
        """On CPU: the same bytes as [num_blocks, runs, block_size, bytes]: a row of a token in each run, or a
        piece of one."""
        if self.device.type == "cpu":
            # Zeros from calloc: pages are committed only when first written, and padding read by attention
            # is never NaN (a masked NaN would still spoil a weighted sum).
            raw = np.zeros(num_blocks * layout.block_bytes, dtype=np.uint8)
            self.data = torch.from_numpy(raw).view(dtype).view(shape)
            num_runs = layout.num_layers * layout.num_parts * num_pieces
            self._token_rows = raw.reshape(num_blocks, num_runs, layout.block_size, -1)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=self.device)
        self._layers = list(self.data[: self.num_blocks].unbind(dim=1))
        self._bytes = self.data.view(num_blocks, -1).view(torch.uint8)
        self.pages: DeviceKV | None = None
        """KV of layers with windows, whose blocks are the pages; None: there are none."""
        if num_pages:
            of_page = self._bytes[self._first_page :].reshape(num_pages, -1)
            self.pages = _Pages(layout.page, of_page[:, : layout.page.block_bytes], self.device)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.layout.block_bytes

    def layer(self, index: int) -> torch.Tensor:
        """Return one layer of all blocks, a strided view [num_blocks, parts, block_size, heads, dim].

        Codes: uint8 [num_blocks, parts, block_size, row_bytes]. Tiled: [num_blocks, parts, columns / 16,
        block_size, 16].
        """
        return self._layers[index]

    @property
    def block_stride(self) -> int:
        """From a block to the next one, in elements of `data`."""
        return self.data.stride(0)

    @property
    def token_stride(self) -> int:
        """From a token of a block to the next one, in elements of `data`."""
        return self.data.stride(4 if self.layout.tiled else 3)

    def address(self, layer: int, part: int) -> int:
        """Return where the rows of a layer's part begin, in block 0; on CPU, an address in memory."""
        start = layer * self.data.stride(1) + part * self.data.stride(2)
        return self.data.data_ptr() + start * self.data.element_size()

    def block_bytes_view(self, block_id: int) -> torch.Tensor:
        """Return a block as contiguous uint8 [block_bytes]; writing to it writes the block."""
        return self._bytes[block_id]

    def state_blocks(self, state: int) -> range:
        """Return the ids of the blocks that hold a state."""
        each, per_slab = self.layout.blocks_per_state, self.layout.places_per_slab(self.slab)[0]
        first = self._first_state + state * each
        if self.slab:
            first = state // per_slab * self.slab + state % per_slab * each
        return range(first, first + each)

    def page_blocks(self, page: int) -> range:
        """Return the ids of the blocks that hold a page."""
        each = self.layout.blocks_per_page
        first = self._first_page + page * each
        return range(first, first + each)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page."""
        assert self.pages is not None
        self.uploads.order()
        self.pages.data[target] = self.pages.data[source]

    def state_part(self, state: int, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a part of a state, float32; a view."""
        raw = self._bytes[self.state_blocks(state).start :].view(-1)
        return raw[offset : offset + 4 * math.prod(shape)].view(torch.float32).view(shape)

    @property
    def floats(self) -> torch.Tensor:
        """All bytes as float32, as states are; for kernels that find them by their blocks."""
        raw = self._bytes.view(-1)
        return raw[: raw.numel() // 4 * 4].view(torch.float32)

    def state_address(self, state: int) -> int:
        """Return where a state begins in memory; on CPU."""
        return self._bytes[self.state_blocks(state).start].data_ptr()

    def clear_slab(self, slab: int) -> None:
        """Zero what held something else: bytes of a state, read as KV behind a mask, might be no numbers."""
        self.uploads.order()
        self._bytes[slab * self.slab : (slab + 1) * self.slab].zero_()
        accelerator_of(self.device).synchronize()

    def block_run(self, first: int, count: int) -> torch.Tensor:
        """Return blocks that follow each other as uint8 [count * block_bytes], as `block_bytes_view`."""
        return self._bytes[first : first + count].view(-1)

    def touch(self, block_id: int) -> None:
        """Have memory given to a block that was never used; its first use takes milliseconds otherwise."""
        if self._token_rows is not None:
            self._token_rows[block_id] = 0

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of block `src` into block `dst`."""
        if self.layout.compressed is not None:
            num_tokens = self.layout.block_size  # entries don't lie by token
        if self._token_rows is not None:
            # Less than a megabyte: torch would wake its threads, which costs more than the copy on busy cores
            # (measured: 6 ms instead of 0.14 ms).
            self._token_rows[dst, :, :num_tokens] = self._token_rows[src, :, :num_tokens]
        else:
            tokens = 3 if self.layout.tiled else 2  # axis of a block
            source, target = self.data[src], self.data[dst]
            self.uploads.order()
            target.narrow(tokens, 0, num_tokens).copy_(source.narrow(tokens, 0, num_tokens))
            # `src` may be evicted right away and filled from another stream.
            accelerator_of(self.device).synchronize()


def _check_places(layout: KVLayout, num_blocks: int) -> None:
    """Raise ConfigError if there are more places of rows and entries than kernels can count."""
    if layout.compressed is None:
        return
    most = _MOST_PLACES * layout.compressed.unit * DTYPE_BYTES[layout.dtype]
    if num_blocks * layout.block_bytes > most:
        raise ConfigError(
            f"the KV cache of a model that compresses its KV takes at most {most} bytes with this dtype; "
            "give it less memory"
        )


class _Pages(DeviceKV):
    """Pages as blocks of a layout of their own, in another's memory."""

    def __init__(self, layout: KVLayout, raw: torch.Tensor, device: torch.device) -> None:
        """`raw` uint8 [num_pages, layout.block_bytes], each page in one run."""
        self.layout, self.device = layout, device
        self.num_blocks, self.num_states, self.num_pages, self.slab = raw.shape[0], 0, 0, 0
        self.pages = None
        dtype, shape = TORCH_DTYPES[layout.dtype], layout.block_shape
        if layout.stored == "plain":
            self.data = raw.view(dtype).view(-1, *shape)
        else:
            self.data = raw.view(-1, *shape[:-2], layout.row_bytes)
        self._layers = list(self.data.unbind(dim=1))
        self._bytes = raw
        self._token_rows = None
