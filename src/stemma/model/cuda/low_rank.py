"""Adapters of a fused decoder on a device: rows of several in one step, and in one recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from stemma.memory.device.accelerator import accelerator_of
from stemma.model.cpu.low_rank import joined_pairs
from stemma.model.cuda.low_rank_kernels import activate, low_rank_down, low_rank_up
from stemma.model.cuda.products import Gate, Sums
from stemma.model.families.layout import Layer, Linear, Mixture, ModelLayout
from stemma.model.lora.adapter import Adapter, AdapterRows, LowRankPair

INPUTS, EXPAND, OUTPUT, GATE_UP, DOWN = range(5)
"""Products of a layer that adapters may add to."""
MOST_ADAPTERS = 64
"""In a step that is recorded."""
_TILE, _PIECE, _BLOCK_N, _ACTIVATED = 16, 512, 128, 1024
_MOST_TILES = 2048 // _TILE + MOST_ADAPTERS


class DeviceAdapter:
    """An adapter's matrices on a device, and the table that kernels find them by."""

    def __init__(
        self, adapter: Adapter, layout: ModelLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._matrices: list[torch.Tensor] = []  # the table points into them
        self.rank = _TILE
        """The largest of its products, a multiple of a tile."""
        entries = []
        for layer in layout.layers:
            for number, linears in enumerate(_products(layer)):
                pair = joined_pairs(linears, adapter.pairs, layer.order if number == INPUTS else None)
                entries.append((0, 0, 0, 0) if pair is None else self._entry(pair, dtype, device))
        self.table = torch.tensor(entries, dtype=torch.int64).to(device)

    def _entry(
        self, pair: LowRankPair, dtype: torch.dtype, device: torch.device
    ) -> tuple[int, int, int, int]:
        missing = -pair.down.shape[0] % _TILE
        down = F.pad(pair.down, (0, 0, 0, missing)).to(device, dtype).contiguous()
        up = F.pad(pair.up, (0, missing)).to(device, dtype).contiguous()
        self._matrices += [down, up]
        self.rank = max(self.rank, len(down))
        scale = int(torch.tensor(pair.scale, dtype=torch.float32).view(torch.int32))
        return down.data_ptr(), up.data_ptr(), len(down), scale


def _products(layer: Layer) -> list[list[Linear]]:
    """Return the linear layers of each product, in order of the numbers above."""
    expand = [] if layer.latent is None or layer.latent.expand is None else [layer.latent.expand]
    gated = layer.mlp.shared if isinstance(layer.mlp, Mixture) else layer.mlp
    mlp = [[], []] if gated is None else [[gated.gate, gated.up], [gated.down]]
    return [list(layer.inputs), expand, [layer.output], *mlp]


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """The adapters of a step."""

    tiles: torch.Tensor
    """int64 [n, 3]: as `low_rank_down` reads them; those that aren't used have no rows."""
    rank: int
    """A power of 2 that no adapter's exceeds."""

    @property
    def form(self) -> tuple[int, int]:
        """What kernels are launched by beside the rows: steps that agree in it share recordings."""
        return len(self.tiles), self.rank

    def add(self, number: int, x: torch.Tensor, sums: Sums) -> Sums:
        """Add to what a product of rows x [T, K] left, [T, N]; `number`: of the product in tables."""
        y, (_, inputs) = sums.join(), x.shape
        num_tiles, pieces = len(self.tiles), triton.cdiv(inputs, _PIECE)
        middle = x.new_empty(pieces, num_tiles * _TILE, self.rank, dtype=torch.float32)
        given = middle, self.tiles, number
        widens = {"ROOM": self.rank, "WIDEN": x.device.type == "cpu", "num_warps": 4}
        size = middle.stride(0)
        down: Any = low_rank_down[(num_tiles, pieces)]
        down(x, *given, inputs, x.stride(0), size, PIECE=_PIECE, **widens)
        up: Any = low_rank_up[(num_tiles, triton.cdiv(y.shape[1], _BLOCK_N))]
        up(y, *given, y.shape[1], y.stride(0), size, PIECES=pieces, BLOCK_N=_BLOCK_N, **widens)
        return Sums(y, 1, None, y.dtype)


class AdapterTiles:
    """Where the adapters of steps stand in device memory, at one address."""

    def __init__(self, device: torch.device) -> None:
        self._device = accelerator_of(device)
        self._tiles = torch.zeros(_MOST_TILES, 3, dtype=torch.int64, device=device)

    def step(self, adapters: Sequence[AdapterRows], num_rows: int) -> AdapterStep | None:
        """Return what adapters add in a step of `num_rows` rows; None: there are none."""
        if not adapters:
            return None
        entries, ranks = [], []
        for each in adapters:
            assert isinstance(each.prepared, DeviceAdapter)
            ranks.append(each.prepared.rank)
            begin, end = each.rows
            entries += [
                (first, min(_TILE, end - first), each.prepared.table.data_ptr())
                for first in range(begin, end, _TILE)
            ]
        room = triton.cdiv(num_rows, _TILE) + triton.next_power_of_2(max(4, len(adapters)))
        host = torch.zeros(room, 3, dtype=torch.int64, pin_memory=self._device.pins_memory)
        host[: len(entries)] = torch.tensor(entries)
        tiles = self._tiles[:room]
        if room > _MOST_TILES:
            tiles = torch.empty_like(host, device=tiles.device)
        tiles.copy_(host, non_blocking=True)
        return AdapterStep(tiles, triton.next_power_of_2(max(ranks)))


def activate_both(both: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return what gates and ups [T, 2 N] become, [T, N]."""
    y = both.new_empty(len(both), both.shape[1] // 2)
    kernel: Any = activate[(triton.cdiv(y.numel(), _ACTIVATED),)]
    kernel(*(both, y, y.numel(), y.shape[1], gate.sharpness, gate.limit), GATE=gate.kind, BLOCK=_ACTIVATED)
    return y
