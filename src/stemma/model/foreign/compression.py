"""DeepSeek-V4's attention of transformers' modules, over windows and compressed entries in paged KV.

`compress_attention` replaces its forward by one that hands tokens' rows to the step that runs, and says how
entries are made of them. Results are rounded where transformers rounds them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.attend.attention import AttentionCall, StepContext
from stemma.model.attend.compression import Compression, kept_by, span_of
from stemma.model.attend.selection import Selection, TokenScores
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.foreign.attention import STEP_KEYWORD
from stemma.model.foreign.rowwise import GRAIN, in_whole_vectors
from stemma.model.foreign.streams import mix_streams

_ATTENTION, _GROUPED = "DeepseekV4Attention", "DeepseekV4GroupedLinear"
_OVERLAPPING, _WHOLE = "DeepseekV4CSACompressor", "DeepseekV4HCACompressor"
_LONGEST_WINDOW = 4096
_LONGEST_RATE = 1 << 14
_MOST_ROUNDS = 1000


def compress_attention(model: nn.Module) -> None:
    """Make every layer of DeepSeek-V4 attend over rows and entries in paged KV.

    Raises UnsupportedModel, ModelError for a config or a checkpoint that makes no such layers.
    """
    modules: list[Any] = list(model.modules())
    known = [module for module in modules if type(module).__name__ == _ATTENTION]
    for module in known:
        _check(module)
        module.forward = MethodType(_attend, module)
    if known:
        mix_streams(modules)
    for module in modules if known else []:
        if isinstance(table := getattr(module, "tid2eid", None), torch.Tensor):
            _check_table(table, module.num_experts)


def _check(module: Any) -> None:
    config, compressor = module.config, module.compressor
    wrong = None
    if not 1 <= module.sliding_window <= _LONGEST_WINDOW:
        wrong = f"sliding_window {module.sliding_window}, not 1 to {_LONGEST_WINDOW}"
    elif config.hc_mult < 1 or config.hc_mult * config.hidden_size >= GRAIN:
        wrong = f"{config.hc_mult} streams of {config.hidden_size} numbers, not fewer than {GRAIN} in all"
    elif not 0 <= config.hc_sinkhorn_iters <= _MOST_ROUNDS:
        wrong = f"hc_sinkhorn_iters {config.hc_sinkhorn_iters}, not 0 to {_MOST_ROUNDS}"
    elif compressor is not None and not 1 <= compressor.compress_rate <= _LONGEST_RATE:
        wrong = f"a compress rate of {compressor.compress_rate}, not 1 to {_LONGEST_RATE}"
    elif compressor is not None and type(compressor).__name__ == _OVERLAPPING:
        if config.index_topk < 1 or config.index_n_heads < 1:
            wrong = f"index_topk {config.index_topk} and index_n_heads {config.index_n_heads}, not 1 or more"
    elif compressor is not None and type(compressor).__name__ != _WHOLE:
        wrong = f"a {type(compressor).__name__}, which isn't known"
    if wrong is not None:
        raise UnsupportedModel(
            f"DeepseekV4ForCausalLM: layer {module.layer_idx} has {wrong}; compare config.json with the one "
            "the checkpoint was published with"
        )


def _check_table(table: torch.Tensor, num_experts: int) -> None:
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < num_experts:
        raise ModelError(
            f"DeepseekV4ForCausalLM: tid2eid names experts {int(table.min())} to {int(table.max())} of "
            f"{num_experts}; the checkpoint is broken: download it again"
        )


def pack_grouped(model: nn.Module, packing: Packing) -> None:
    """Pack linear layers of DeepSeek-V4 that multiply groups of their inputs apart, group by group."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__ != _GROUPED:
            continue
        groups = module.weight.detach().view(module.n_groups, -1, module.weight.shape[1])
        if can_pack(groups[0]):
            module.stemma_groups = [packing.tensor(group) for group in groups]
            module.weight = None
            module.forward = MethodType(_multiply_groups, module)


def _multiply_groups(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace the forward of a grouped linear layer: [..., groups, in] -> [..., groups, out]."""
    rows = x.reshape(-1, *x.shape[-2:])
    products: list[PackedProduct] = module.stemma_groups
    output = rows.new_empty(len(rows), len(products), products[0].out_features)
    for group, product in enumerate(products):
        product.into(rows[:, group], output[:, group])
    return output.view(*x.shape[:-1], -1)


def _attend(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replace the forward of a layer's attention: hidden states [1, T, H] -> the same."""
    num_tokens = hidden_states.shape[1]
    step: StepContext = kwargs[STEP_KEYWORD]
    rotate = partial(_code_of(module).apply_rotary_pos_emb, unsqueeze_dim=2)
    cos, sin = position_embeddings[module.rope_layer_type]
    query_latent = module.q_a_norm(module.q_a_proj(hidden_states))
    query = module.q_b_proj(query_latent).view(1, num_tokens, -1, module.head_dim)
    query = rotate(module.q_b_norm(query), cos, sin)
    key = rotate(module.kv_norm(module.kv_proj(hidden_states))[:, :, None], cos, sin)[:, :, 0]
    row = torch.cat((key, *_projected(module, hidden_states)), dim=-1)[0]
    call = AttentionCall(
        layer_idx=module.layer_idx,
        scaling=module.scaling,
        sliding_window=module.sliding_window,
        softcap=None,
        latent=None,
        sinks=module.sinks.detach().float(),
        compression=_compression(module, hidden_states, query_latent, (cos, sin)),
    )
    output = step.attend(call, query[0], row[:, None], key[0, :, None])[None]
    output = rotate(output, cos, -sin)
    grouped = module.o_a_proj(output.reshape(1, num_tokens, module.config.o_groups, -1))
    return module.o_b_proj(grouped.flatten(2)), None


def _code_of(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def _projected(module: Any, hidden_states: torch.Tensor) -> list[torch.Tensor]:
    """Return what entries are made of: keys and gates, and those of the indexer."""
    compressor = module.compressor
    if compressor is None:
        return []
    parts = [compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)]
    if type(compressor).__name__ == _OVERLAPPING:
        indexer = compressor.indexer
        parts += [indexer.kv_proj(hidden_states), indexer.gate_proj(hidden_states)]
    return parts


def _compression(
    module: Any,
    hidden_states: torch.Tensor,
    query_latent: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> Compression:
    """Return how a layer makes entries, and how its new tokens choose among them."""
    config, compressor, dim = module.config, module.compressor, module.head_dim
    kept, span = kept_by(config, module.layer_idx), span_of(config, module.layer_idx)
    if compressor is None:
        return Compression(kept)
    if type(compressor).__name__ == _WHOLE:
        return Compression(kept, span, _EntryMaker(dim, (compressor,), overlaps=False))
    indexer = compressor.indexer
    query = indexer.q_b_proj(query_latent).view(1, hidden_states.shape[1], -1, indexer.head_dim)
    query = _code_of(module).apply_rotary_pos_emb(query, *angles, unsqueeze_dim=2)[0].float()
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden_states)[0].float() * (scorer.weights_scaling * scorer.softmax_scale)
    selection = Selection(int(indexer.index_topk), int(indexer.head_dim), TokenScores(query, weights))
    return Compression(kept, span, _EntryMaker(dim, (compressor, indexer), overlaps=True), selection)


@dataclass(frozen=True, slots=True)
class _EntryMaker:
    """Makes entries [n, entry_dim] of rows [n, span, row_dim]: of a compressor, and its indexer."""

    start: int
    """Where what they are made of begins in a row."""
    parts: tuple[Any, ...]
    overlaps: bool

    def __call__(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        made, start = [], self.start
        for part in self.parts:
            width = part.head_dim * (2 if self.overlaps else 1)
            kv, gate = (rows[..., at : at + width] for at in (start, start + width))
            start += 2 * width
            entries = part.kv_norm(self._pool(part, kv, gate, numbers))
            positions = (numbers * part.compress_rate)[None]
            cos, sin = part.rotary_emb(entries, position_ids=positions, layer_type=part.rope_layer_type)
            made.append(_code_of(part).apply_rotary_pos_emb(entries[None, None], cos, sin)[0, 0])
        return torch.cat(made, dim=-1)

    def _pool(self, part: Any, kv: torch.Tensor, gate: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the mean of kv [n, span, width] over a span by the softmax of gates: [n, head_dim]."""
        rate, dim, bias = part.compress_rate, part.head_dim, part.position_bias
        if self.overlaps:  # what the window before gives, and what the entry's own does
            kv = torch.cat((kv[:, :rate, :dim], kv[:, rate:, dim:]), dim=1)
            gate = torch.cat(
                (gate[:, :rate, :dim] + bias[:, :dim], gate[:, rate:, dim:] + bias[:, dim:]), dim=1
            )
            is_first = (numbers == 0).nonzero()[:, 0]
            kv[is_first, :rate] = 0
            gate[is_first, :rate] = float("-inf")
        else:
            gate = gate + bias
        gate = gate.float()
        weights = in_whole_vectors(torch.exp, gate - gate.amax(1, keepdim=True))
        weights = (weights / _sum(weights)[:, None]).to(kv.dtype)
        return _sum(kv * weights).to(kv.dtype)


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Sum [n, span, dim] over the span in order, as float32."""
    total = x[:, 0].float()
    for number in range(1, x.shape[1]):
        total = total + x[:, number].float()
    return total
