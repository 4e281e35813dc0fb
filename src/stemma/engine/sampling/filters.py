"""top_k, top_p and min_p on rows of weights, and the draw from what they leave; pure tensor functions.

A weight is exp(logit - largest logit): 1 for the most likely token, not normalised. Each filter is a
threshold on weights, and what is equal to the threshold stays, so the result doesn't depend on how equal
values happen to be sorted.

Vocabularies are large: a full sort takes milliseconds a row, and on CPU even torch's `argmax` and `topk` are
many times slower than a plain maximum. So the largest values are found through the maxima of blocks of ids (a
row's k largest values lie in the k blocks with the largest maxima), and only a row whose top_p reaches
beyond `_MAX_NUCLEUS` tokens needs more passes. Whether it does is known to the device alone: where the host
may not wait for it (`may_wait` False), such rows are sorted in whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stemma.engine.sampling.params import SamplingParams

MAX_CANDIDATES = 256
"""Rows with a top_k up to this are drawn from their candidates alone."""
_MAX_NUCLEUS = 128
"""Largest weights looked at for top_p before the exact search."""
_IDS_PER_BLOCK = 128
_NUM_BINS = 2048


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Return the column of the largest value of each row of x [R, V], as int64 [R]."""
    if x.device.type != "cpu":
        return x.argmax(dim=-1)
    return torch.from_numpy(x.numpy().argmax(axis=-1))  # torch's own is many times slower


def candidates(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids [R, min(k, V)] of the largest entries of each row of x [R, V], largest first."""
    num_rows, vocab_size = x.shape
    k = min(k, vocab_size)
    num_blocks = vocab_size // _IDS_PER_BLOCK
    if num_blocks < 8 * k:
        return torch.topk(x, k, dim=-1)
    num_whole = num_blocks * _IDS_PER_BLOCK
    blocks = x[:, :num_whole].reshape(num_rows, num_blocks, _IDS_PER_BLOCK)
    best = torch.topk(blocks.amax(dim=-1), k, dim=-1).indices
    values = torch.gather(blocks, 1, best[:, :, None].expand(-1, -1, _IDS_PER_BLOCK)).flatten(1)
    ids = (best[:, :, None] * _IDS_PER_BLOCK + torch.arange(_IDS_PER_BLOCK, device=x.device)).flatten(1)
    if num_whole < vocab_size:
        rest = torch.arange(num_whole, vocab_size, device=x.device)
        values = torch.cat([values, x[:, num_whole:]], dim=1)
        ids = torch.cat([ids, rest.expand(num_rows, -1)], dim=1)
    top, where = torch.topk(values, k, dim=-1)
    return top, ids.gather(1, where)


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    """Return exp(logits - max) of logits [R, V] as [R, W], W >= V: zeros fill the last block of ids."""
    num_rows, vocab_size = logits.shape
    width = vocab_size + -vocab_size % _IDS_PER_BLOCK
    weights = logits.new_empty(num_rows, width)
    used = weights
    if width > vocab_size:
        used = weights[:, :vocab_size]
        weights[:, vocab_size:] = 0.0
    torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=used)
    used.exp_()
    return weights


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of numbers on `device` [len(values)], without waiting for work queued there."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def keep(
    weights: torch.Tensor,
    params: Sequence[SamplingParams],
    *,
    is_sorted: bool = False,
    may_wait: bool = True,
) -> None:
    """Set to 0, in place, the weights [R, V] that the rows' filters drop.

    `is_sorted`: each row is descending, and may be only the head of a vocabulary, at least top_k long.
    min_p: keep what is at least min_p times as likely as the most likely token. top_k: keep the k largest.
    top_p: among those, keep a token if the more likely ones sum to less than top_p.
    """
    num_columns = weights.shape[1]
    top_k = [p.top_k if 0 < p.top_k < num_columns else 0 for p in params]
    min_p = [p.min_p for p in params]
    has_top_p = any(p.top_p < 1.0 for p in params)
    if not has_top_p and not any(top_k) and not any(min_p):
        return
    lowest = upload(min_p, weights.device, weights.dtype)
    values = weights
    # Among k candidates a nucleus never reaches beyond them.
    is_open = any(p.top_p < 1.0 and not k for p, k in zip(params, top_k, strict=True))
    if not is_sorted and is_open and not may_wait:
        values = torch.sort(weights, dim=-1, descending=True).values
    elif not is_sorted and (has_top_p or any(top_k)):
        values, _ = candidates(weights, max(_MAX_NUCLEUS if has_top_p else 1, *top_k))
    if any(top_k):
        last = upload([max(k, 1) - 1 for k in top_k], weights.device)
        has_k = upload([k > 0 for k in top_k], weights.device)
        kth = values.gather(1, last[:, None]).flatten()
        lowest = torch.where(has_k, torch.maximum(lowest, kth), lowest)
    if any(top_k) or any(min_p):
        weights.masked_fill_(weights < lowest[:, None], 0.0)
        values = weights if is_sorted else values.masked_fill(values < lowest[:, None], 0.0)
    if has_top_p:
        limits = upload([p.top_p for p in params], weights.device, torch.float64)
        thresholds = _top_p_thresholds(weights, values, limits, is_whole=not may_wait)
        weights.masked_fill_(weights < thresholds[:, None], 0.0)


def _top_p_thresholds(
    weights: torch.Tensor, values: torch.Tensor, limits: torch.Tensor, *, is_whole: bool
) -> torch.Tensor:
    """Return the smallest weight [R] that top_p = `limits` [R] keeps.

    `values` [R, K] are the largest of `weights` [R, V], descending; `is_whole`: no nucleus reaches beyond.
    """
    mass = limits * weights.sum(dim=-1, dtype=torch.float64)
    head = values.double()
    sums = head.cumsum(dim=-1)
    num_kept = ((sums - head) < mass[:, None]).sum(dim=-1).clamp(min=1)
    thresholds = values.gather(1, num_kept[:, None] - 1).flatten()
    thresholds = torch.where(limits < 1.0, thresholds, 0.0)
    if is_whole:
        return thresholds
    is_beyond = (sums[:, -1] < mass) & (values[:, -1] > 0) & (limits < 1.0)
    for row in torch.nonzero(is_beyond).flatten().tolist():
        thresholds[row] = _search_nucleus(weights[row], float(mass[row]))
    return thresholds


def _search_nucleus(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Return the weight of `weights` [V], in descending order, before which the sum is less than `mass`.

    A histogram over logarithms finds the narrow range in which that happens; only this range is sorted.
    """
    depth = weights.log().neg_()
    span = float(depth[weights > 0].amax().clamp(min=1e-6))
    bins = depth.mul_(_NUM_BINS / span).clamp_(max=_NUM_BINS - 1).long()
    sums = torch.zeros(_NUM_BINS, dtype=torch.float64, device=weights.device)
    sums.scatter_add_(0, bins, weights.double())
    reached = int((sums.cumsum(0) < mass).sum().clamp(max=_NUM_BINS - 1))
    inside = torch.sort(weights[bins == reached], descending=True).values
    before = sums[:reached].sum() + inside.double().cumsum(0) - inside
    return inside[int((before < mass).sum().clamp(min=1)) - 1]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one column a row of `weights` [R, V] by inverse CDF in order of column; return int64 [R].

    `uniforms` [R] float64 in [0, 1). Two levels, sums of blocks and then inside one block, keep the part in
    float64 small.
    """
    num_rows, num_columns = weights.shape
    if num_columns % _IDS_PER_BLOCK:
        return _first_above(weights.double(), uniforms * weights.sum(dim=-1, dtype=torch.float64))[0]
    blocks = weights.view(num_rows, -1, _IDS_PER_BLOCK)
    sums = blocks.sum(dim=-1).double()
    block, rest = _first_above(sums, uniforms * sums.sum(dim=-1))
    within = blocks[torch.arange(num_rows, device=weights.device), block].double()
    return block * _IDS_PER_BLOCK + _first_above(within, rest)[0]


def _first_above(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first column where the running sum of `weights` [R, C] exceeds `target` [R], and the rest.

    Rounding may put the target at or above the total: it is then taken just below, so that a column of
    weight zero is never chosen.
    """
    sums = weights.cumsum(dim=-1)
    target = torch.minimum(target, torch.nextafter(sums[:, -1], torch.zeros_like(target)))
    column = torch.searchsorted(sums, target[:, None], right=True).flatten()
    column = column.clamp(max=sums.shape[1] - 1)  # only NaN logits get there
    before = sums.gather(1, column[:, None]).flatten() - weights.gather(1, column[:, None]).flatten()
    return column, (target - before).clamp(min=0.0)
