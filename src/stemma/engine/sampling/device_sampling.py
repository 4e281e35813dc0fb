"""Draws tokens while the host looks at no value: for steps launched before it knows what the last one drew.

`plan_draws` fixes on the host what a draw depends on beside its logits; `draw_tokens` is tensor work alone,
so on CUDA it only queues kernels and copies. The tokens are those that `sampling.Sampler` draws. Penalties
need the tokens drawn before, which aren't known yet: rows with penalties don't come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stemma.engine.sampling.filters import MAX_CANDIDATES, argmax, candidates, draw, keep, upload, weights_of
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampled, SamplingState, divide


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """What R rows of logits are drawn with."""

    params: tuple[SamplingParams, ...]
    uniforms: tuple[float, ...]
    """The rows' random numbers; 0 where the most likely token is taken."""
    masked: tuple[tuple[int, int], ...]
    """Row and token of what may not be drawn yet (min_tokens)."""


def plan_draws(states: Sequence[SamplingState], num_unknown: Sequence[int]) -> DrawPlan:
    """Plan one draw a state, where `num_unknown` tokens come between the state's output and the draw."""
    positions = [s.num_output_tokens + n for s, n in zip(states, num_unknown, strict=True)]
    return DrawPlan(
        tuple(s.params for s in states),
        tuple(0.0 if s.params.greedy else s.uniform(p) for s, p in zip(states, positions, strict=True)),
        tuple(
            (row, token)
            for row, (s, p) in enumerate(zip(states, positions, strict=True))
            if s.params.min_tokens
            for token in s.masked_ids(p)
        ),
    )


@dataclass(frozen=True, slots=True)
class DeviceDraw:
    """R tokens on the logits' device, and what the host will read once the device is done."""

    token_ids: torch.Tensor
    """[R] int64."""
    _plan: DrawPlan
    _host_ids: torch.Tensor
    _logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def read(self) -> Sampled:
        """Return the tokens; the caller has waited for the device."""
        token_ids = [int(token) for token in self._host_ids.tolist()]
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            own, values, ids = (one.tolist() for one in self._logprobs)
            for at, (row, num) in enumerate(_wanted(self._plan)):
                top = tuple(zip(ids[at][:num], values[at][:num], strict=True))
                logprobs[row] = TokenLogprob(token_ids[row], own[at], top)
        return Sampled(token_ids, logprobs)


def draw_tokens(logits: torch.Tensor, plan: DrawPlan) -> DeviceDraw:
    """Draw one token for each row of `logits` [R, V] float32, which is left as it is."""
    allowed = logits
    if plan.masked:
        rows, ids = zip(*plan.masked, strict=True)
        allowed = logits.clone()
        allowed[upload(rows, logits.device), upload(ids, logits.device)] = -torch.inf
    drawn = [row for row, params in enumerate(plan.params) if not params.greedy]
    if len(drawn) < len(plan.params):
        token_ids = argmax(allowed)
    else:
        token_ids = torch.empty(len(plan.params), dtype=torch.int64, device=logits.device)
    few = [row for row in drawn if 0 < plan.params[row].top_k <= min(MAX_CANDIDATES, logits.shape[1] - 1)]
    many = sorted(set(drawn) - set(few))
    for group, is_narrow in ((few, True), (many, False)):
        if group:
            at = upload(group, logits.device)
            token_ids.index_copy_(0, at, _draw_group(allowed.index_select(0, at), plan, group, is_narrow))
    return DeviceDraw(
        token_ids,
        plan,
        token_ids.to("cpu", non_blocking=True),
        _logprobs(logits, plan, token_ids),
    )


def _draw_group(logits: torch.Tensor, plan: DrawPlan, group: Sequence[int], is_narrow: bool) -> torch.Tensor:
    """Draw for the rows of `group`; `logits` are theirs. Narrow: from candidates where those are enough."""
    params = [plan.params[row] for row in group]
    uniforms = upload([plan.uniforms[row] for row in group], logits.device, torch.float64)
    weights = weights_of(divide(logits, params))
    keep(weights, params, may_wait=False)
    wide = draw(weights, uniforms)
    if not is_narrow:
        return wide
    values, ids = candidates(logits, max(p.top_k for p in params) + 1)
    weights = torch.exp(divide(values, params) - divide(values[:, :1], params))
    keep(weights, params, is_sorted=True, may_wait=False)
    # If even the last candidate is kept, equal logits may go on beyond what was fetched.
    is_enough = weights[:, -1] == 0.0
    ids, order = torch.sort(ids, dim=-1)
    narrow = ids.gather(1, draw(weights.gather(1, order), uniforms)[:, None]).flatten()
    return torch.where(is_enough, narrow, wide)


def _wanted(plan: DrawPlan) -> list[tuple[int, int]]:
    """Return the rows that want log-probabilities, and of how many top tokens."""
    return [(row, p.logprobs) for row, p in enumerate(plan.params) if p.logprobs is not None]


def _logprobs(
    logits: torch.Tensor, plan: DrawPlan, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return for the rows that want them: log-probability of the token drawn, of the top, and its ids."""
    wanted = _wanted(plan)
    if not wanted:
        return None
    rows = upload([row for row, _ in wanted], logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, rows), dim=-1)
    own = logprobs.gather(1, token_ids.index_select(0, rows)[:, None]).flatten()
    values, ids = torch.topk(logprobs, min(max(num for _, num in wanted), logits.shape[1]), dim=-1)
    return (
        own.to("cpu", non_blocking=True),
        values.to("cpu", non_blocking=True),
        ids.to("cpu", non_blocking=True),
    )
