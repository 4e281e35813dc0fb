"""Changes that llama.cpp's converter makes to tensors, undone: order of rows, numbers, joined layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Numbers: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor's difference between the file and transformers."""

    rows: Sequence[int] | None = None
    """Where the file has each row; None: they are in order."""
    columns: Sequence[int] | None = None
    """Where the file has each column; None: they are in order."""
    numbers: Numbers | None = None
    """Takes the tensor as the file has it, in float32; returns it as transformers has it."""
    layout: Numbers | None = None
    """As `numbers`, of any dtype: only the shape differs."""
    dimensions: int | None = None
    """The number that the file must have; None: any."""


@dataclass(frozen=True, slots=True)
class Join:
    """A weight of transformers that is several tensors of the file."""

    parts: tuple[str, ...]
    """Their names within the layer."""
    rows: Callable[[Any], Sequence[int]] | None = None
    """Takes the config; returns where each row is, of all parts' rows below each other. None: in order."""
    plain: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    """Joins tensors that never stay quantized; None: rows below each other."""
    dimensions: int = 2
    """Those that the parts have in the file."""


def unchanged(_name: str, _config: Any) -> Change | None:
    """Return that a tensor is as transformers has it."""
    return None


def pairs_to_halves(num_heads: int, head_dim: int) -> list[int]:
    """Return rows of queries or keys that rotate half a head apart, where they lie next to each other."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, -1, 2)
    return rows.transpose(1, 2).flatten().tolist()


def rotated_heads(name: str, config: Any, head_dim: int) -> Change | None:
    """Return the change of query and key weights and biases of a model whose pairs rotate."""
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    count = heads.get(name.rpartition(".")[0])
    return None if count is None else Change(rows=pairs_to_halves(count, head_dim))


def less_one(numbers: torch.Tensor) -> torch.Tensor:
    """Return a norm's weights as families keep them that add 1."""
    return numbers - 1.0


def to_logarithm(numbers: torch.Tensor) -> torch.Tensor:
    """Return logarithms [heads] of decays that the file has as negative numbers, [heads] or [heads, 1]."""
    return torch.log(-numbers.flatten())


def flat(numbers: torch.Tensor) -> torch.Tensor:
    """Return a vector that the file has in several dimensions."""
    return numbers.flatten()


def with_channel(numbers: torch.Tensor) -> torch.Tensor:
    """Return the weight of a short convolution, [channels, 1, width]."""
    return numbers[:, None]


def transposed(numbers: torch.Tensor) -> torch.Tensor:
    """Return experts whose weights transformers has as [inputs, outputs]."""
    return numbers.transpose(-1, -2).contiguous()


def interleaved(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join gates and ups [..., rows] by turns, as [..., 2 rows]."""
    return torch.stack(tuple(parts), dim=-1).flatten(-2)
