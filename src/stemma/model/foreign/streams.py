"""DeepSeek-V4's streams of hidden states (hyper-connections), mixed so that rows don't depend on each other.

A layer reads a weighted sum of n streams, and adds what it computes to all of them after mixing them by a
matrix [n, n] whose rows and columns sum to 1 (Xie et al., mHC, arXiv:2512.24880). Sums over streams are
computed in order. Results are rounded where transformers rounds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

_LAYER, _CONNECTION = "DeepseekV4DecoderLayer", "DeepseekV4HyperConnection"


def mix_streams(modules: Iterable[Any]) -> None:
    """Replace the forwards of decoder layers and hyper-connections among `modules`."""
    for module in modules:
        if type(module).__name__ == _LAYER:
            module.forward = MethodType(_run_layer, module)
        elif type(module).__name__ == _CONNECTION:
            module.forward = MethodType(_connect, module)


def _run_layer(
    layer: Any, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Replace the forward of a decoder layer: streams [1, T, n, H] -> the same."""
    post, comb, collapsed = layer.attn_hc(hidden_states)
    attended, _ = layer.self_attn(layer.input_layernorm(collapsed), **kwargs)
    hidden_states = _mix(post, comb, attended, hidden_states)
    post, comb, collapsed = layer.ffn_hc(hidden_states)
    added = layer.mlp(layer.post_attention_layernorm(collapsed), input_ids=input_ids)
    return _mix(post, comb, added, hidden_states)


def _mix(post: torch.Tensor, comb: torch.Tensor, added: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Return comb^T [n, n] times streams [1, T, n, H], plus `added` [1, T, H] by weights post [n]."""
    dtype = streams.dtype
    weights = comb.to(dtype).float()
    total = weights[..., 0, :, None] * streams[..., :1, :].float()
    for stream in range(1, streams.shape[2]):
        total = total + weights[..., stream, :, None] * streams[..., stream : stream + 1, :].float()
    return post.to(dtype).unsqueeze(-1) * added.unsqueeze(-2) + total.to(dtype)


def _connect(module: Any, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace the forward of a hyper-connection: streams [1, T, n, H].

    Returns the weights [1, T, n] of what a layer adds, the matrix [1, T, n, n], and what it reads [1, T, H].
    """
    count, eps = module.hc_mult, module.hc_eps
    flat = module.input_norm(streams.flatten(2).float())
    weights: Any = F.linear(flat, module.fn.float())
    parts, biases = (x.split([count, count, count * count], dim=-1) for x in (weights, module.base))
    read, added, mixed = (
        part * scale + bias for part, scale, bias in zip(parts, module.scale, biases, strict=True)
    )
    read = torch.sigmoid(read) + eps
    matrix = torch.softmax(mixed.view(-1, count, count), dim=-1) + eps
    matrix = torch.from_numpy(_balanced(matrix.numpy(), module.hc_sinkhorn_iters, eps))
    total = read[..., :1] * streams[..., 0, :]
    for stream in range(1, count):
        total = total + read[..., stream : stream + 1] * streams[..., stream, :]
    return 2 * torch.sigmoid(added), matrix[None], total.to(streams.dtype)


def _balanced(matrix: npt.NDArray[np.float32], rounds: int, eps: float) -> npt.NDArray[np.float32]:
    """Divide columns, then rows and columns by turns, by their sums: Sinkhorn-Knopp on [T, n, n].

    With numpy: the matrices are small, and each of torch's hundred operations would cost more than all of it.
    """
    turned = np.ascontiguousarray(matrix.transpose(1, 2, 0))
    least = np.float32(eps)
    turned /= _total(turned, least)
    for _ in range(rounds - 1):
        turned /= _total(turned.transpose(1, 0, 2), least)[:, None]
        turned /= _total(turned, least)
    return np.ascontiguousarray(turned.transpose(2, 0, 1))


def _total(parts: npt.NDArray[np.float32], least: np.float32) -> npt.NDArray[np.float32]:
    """Sum [n, ...] over n in order, from `least` on."""
    total: npt.NDArray[np.float32] = parts[0] + least
    for part in parts[1:]:
        total = total + part
    return total
