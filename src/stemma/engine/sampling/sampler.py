"""From logits to tokens: penalties, filters, one draw a row.

Order of operations: penalties (repetition over prompt and output, then frequency and presence over output),
mask of end tokens (min_tokens), bias and constraints (grammar, allowed ids, bad words), temperature, min_p,
top_k, top_p, draw. Log-probabilities are those of the raw logits.

Two choices make a request's tokens independent of its neighbours in the batch and of drafts:

* the random number of output position t is a pure function of (seed, sequence index, t) (Philox, a
  counter-based generator), so it doesn't matter how often or in which order rows are drawn;
* each of min_p, top_k and top_p is a threshold (ties at the threshold are kept), and the draw walks the
  surviving tokens in order of their id (inverse CDF); see `filters.py`.

What a draw depends on beside its logits is fixed first (`plan_rows`, `plan_rows_ahead`); `draw_tokens` is
tensor work alone. Beside the host it reads no value, so it only queues kernels and copies, and a step can be
launched before the host knows what the last one drew. On CPU, where a look at a value costs nothing, it looks
where that saves work. The tokens are the same. A device with a `Choose` of its own draws the same tokens by
the same random numbers, but for numbers that lie within rounding of the border between two.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stemma.engine.sampling.constraints import keep_allowed
from stemma.engine.sampling.filters import MAX_CANDIDATES, argmax, candidates, draw, keep, upload, weights_of
from stemma.engine.sampling.grammar import PackedMask
from stemma.engine.sampling.logprobs import TokenLogprob, likeliest
from stemma.engine.sampling.one_thread import one_thread_for
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.rules import rules_of
from stemma.engine.sampling.state import SamplingState
from stemma.memory.device.accelerator import accelerator_of
from stemma.model.opened.draw_rules import Choose

_CPU_ELEMENTS = 1 << 20
"""Logits drawn from in one go on CPU: copies of more would take memory and leave the processor's cache."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row of logits, in their order; `logprobs` are None where the request wants none."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class Row:
    """The parameters that a row of logits is drawn with. Fixed when planned: the sequence may go on before
    the draw."""

    state: SamplingState
    """Where `SamplingState.needs_host`, its counts are those at the draw."""
    position: int
    """Number of the token drawn in the output (from 0)."""
    uniform: float
    """Its random number; 0 where the most likely token is taken."""
    ahead: tuple[int, ...] = ()
    """The draft tokens between the output and this row."""


def plan_rows(states: Sequence[SamplingState], drafts: Sequence[Sequence[int]] | None = None) -> list[Row]:
    """Plan the draws after the states' outputs: a row a state without `drafts`.

    With them, sequence s owns ``len(drafts[s]) + 1`` consecutive rows, row j of them coming after
    ``drafts[s][:j]``; its penalties, min_tokens and random number are those of that position.
    """
    if drafts is None:
        return plan_rows_ahead(states, [0] * len(states))
    return [
        _row(state, state.num_output_tokens + j, tuple(draft[:j]))
        for state, draft in zip(states, drafts, strict=True)
        for j in range(len(draft) + 1)
    ]


def plan_rows_ahead(states: Sequence[SamplingState], num_unknown: Sequence[int]) -> list[Row]:
    """Plan a draw a state, where `num_unknown` tokens come between the state's output and the draw.

    Not for states that need the tokens drawn before (penalties), unless none is unknown.
    """
    return [_row(s, s.num_output_tokens + n, ()) for s, n in zip(states, num_unknown, strict=True)]


def _row(state: SamplingState, position: int, ahead: tuple[int, ...]) -> Row:
    return Row(state, position, 0.0 if state.params.greedy else state.uniform(position), ahead)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities under the raw distribution; the host may read them once the device is done."""

    wanted: list[tuple[int, int]]
    """W rows and how many top tokens each wants."""
    own: torch.Tensor
    """[W], of the tokens drawn."""
    values: torch.Tensor
    ids: torch.Tensor
    """[W, K], the top tokens."""


@dataclass(frozen=True, slots=True)
class Draw:
    """R tokens on the logits' device, and what the host will read once the device is done."""

    token_ids: torch.Tensor
    """[R] int64."""
    _host_ids: torch.Tensor
    _logprobs: list[_Logprobs]

    def read(self) -> Sampled:
        """Return the tokens; the caller has waited for the device."""
        token_ids = [int(token) for token in self._host_ids.tolist()]
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        for part in self._logprobs:
            rows = zip(part.wanted, part.own.tolist(), part.values.tolist(), part.ids.tolist(), strict=True)
            for (row, num), own, values, ids in rows:
                top = tuple(zip(ids[:num], values[:num], strict=True))
                logprobs[row] = TokenLogprob(token_ids[row], own, top)
        return Sampled(token_ids, logprobs)


class Sampler:
    """Draws the next tokens of a whole batch; stateless, works on whatever device the logits are on."""

    def __init__(self, choose: Choose | None = None) -> None:
        """`choose`: how the device draws by itself; None: by torch's operations."""
        self._choose = choose

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> Draw:
        """Do what `draw_tokens` does, as this device does it."""
        if self._choose is None:
            return draw_tokens(logits, rows)
        token_ids = self._choose(logits, rules_of(rows))
        return Draw(token_ids, token_ids.to("cpu", non_blocking=True), _logprobs(logits, rows, token_ids, 0))

    def sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Sampled:
        """Draw one token for each row of `logits` [L, V] float32, which is left as it is; wait for it.

        The rows are those of `plan_rows`.
        """
        is_settled = self._choose is None and logits.device.type == "cpu"
        if is_settled and all(state.takes_likeliest for state in states):
            token_ids = logits.numpy().argmax(axis=-1).tolist()
            if any(state.constraints is not None for state in states):
                rows = plan_rows(states, drafts)
                _settle(token_ids, logits, rows, range(len(rows)))
            return Sampled(token_ids, [None] * len(token_ids))
        rows = plan_rows(states, drafts)
        if not rows:
            return Sampled([], [])
        drawn = self.draw(logits, rows)
        accelerator_of(logits.device).synchronize()
        return drawn.read()


def draw_tokens(logits: torch.Tensor, rows: Sequence[Row], *, may_wait: bool | None = None) -> Draw:
    """Draw one token for each row of `logits` [R, V] float32, R > 0, which is left as it is.

    `may_wait`: whether values may be read on the way; None: on CPU alone.
    """
    assert len(rows) == logits.shape[0]
    if may_wait is None:
        may_wait = logits.device.type == "cpu"
    with one_thread_for(logits):
        return _draw_in_parts(logits, rows, may_wait=may_wait)


def _draw_in_parts(logits: torch.Tensor, rows: Sequence[Row], *, may_wait: bool) -> Draw:
    parts, logprobs = [], []
    at_once = rows_at_once(logits)
    for start in range(0, len(rows), at_once):
        own, some = logits[start : start + at_once], rows[start : start + at_once]
        settled = [i for i, row in enumerate(some) if may_wait and _needs_grammar_alone(row)]
        masked = _with_masks_and_penalties(own, some, set(settled))
        parts.append(_choose(masked, some, may_wait=may_wait))
        if settled:
            ids = parts[-1].tolist()
            _settle(ids, own, some, settled)
            parts[-1] = torch.tensor(ids, device=own.device)
        logprobs += _logprobs(own, some, parts[-1], start)
    token_ids = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Draw(token_ids, token_ids.to("cpu", non_blocking=True), logprobs)


def rows_at_once(logits: torch.Tensor) -> int:
    """Return how many rows of logits [L, V] the sampler looks at, and copies, in one go."""
    if logits.device.type != "cpu":
        return max(1, logits.shape[0])
    return max(1, _CPU_ELEMENTS // logits.shape[1])


def _needs_grammar_alone(row: Row) -> bool:
    """Return whether the row takes the most likely token that a grammar allows, and has no other rule."""
    constraints, params = row.state.constraints, row.state.params
    if constraints is None or not params.greedy or row.state.has_penalties:
        return False
    return constraints.is_grammar_alone


def _settle(token_ids: list[int], logits: torch.Tensor, rows: Sequence[Row], settled: Iterable[int]) -> None:
    """Put the most likely token that its grammar allows into `token_ids` [R] for each row in `settled`.

    Given are the most likely of all, and logits [R, V] float32 on CPU. Rows without a grammar are left as
    they are.
    """
    values = logits.numpy()  # a tensor's own indexing costs more than a grammar's answer
    for i in settled:
        constraints = rows[i].state.constraints
        if constraints is not None:
            token_ids[i] = constraints.most_likely(values[i], rows[i].ahead, token_ids[i])


def _with_masks_and_penalties(
    logits: torch.Tensor, rows: Sequence[Row], settled: Container[int]
) -> torch.Tensor:
    """Return the logits with end tokens masked, seen tokens penalised and constraints applied.

    The same tensor if there is none of these. Rows in `settled` are left as they are.
    """
    masked: list[tuple[int, Sequence[int]]] = []
    penalised: list[int] = []
    constrained = [
        (i, row.state.constraints)
        for i, row in enumerate(rows)
        if row.state.constraints is not None and i not in settled
    ]
    for i, row in enumerate(rows):
        ids = row.state.masked_ids(row.position)
        if ids:
            masked.append((i, ids))
        if row.state.has_penalties:
            penalised.append(i)
    if not masked and not penalised and not constrained:
        return logits
    masks = _grammar_masks(rows, [i for i, _ in constrained])
    if len(masks) == len(rows):
        return keep_allowed(logits, list(masks.values()))
    result = logits.clone()
    if penalised:
        _penalise(result, rows, penalised)
    if masked:
        where_row = [i for i, ids in masked for _ in ids]
        where_id = [token for _, ids in masked for token in ids]
        result[upload(where_row, logits.device), upload(where_id, logits.device)] = -torch.inf
    for i, constraints in constrained:
        if i in masks:
            result[i] = keep_allowed(result[i : i + 1], [masks[i]])[0]
        else:
            constraints.apply(result[i], rows[i].ahead)
    return result


def _grammar_masks(rows: Sequence[Row], indices: Sequence[int]) -> dict[int, PackedMask]:
    """Return the masks of those of the rows whose only rule is a grammar, by row, ascending."""
    masks: dict[int, PackedMask] = {}
    for i in indices:
        state = rows[i].state
        assert state.constraints is not None
        if state.constraints.is_grammar_alone and not state.has_penalties:
            mask = state.constraints.packed(rows[i].ahead)
            if mask is not None and mask.any():
                masks[i] = mask
    return masks


def _penalise(logits: torch.Tensor, rows: Sequence[Row], indices: Sequence[int]) -> None:
    """Apply the three penalties in place, touching only the tokens that were seen."""
    vocab_size = logits.shape[1]
    places, counts, weights = [], [], []
    for i in indices:
        ids, count = rows[i].state.token_counts(rows[i].ahead)
        params = rows[i].state.params
        places.append(ids + i * vocab_size)
        counts.append(count)
        weights.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    lengths = [len(count) for count in counts]
    where = torch.from_numpy(np.concatenate(places)).to(logits.device)
    count_of = torch.from_numpy(np.concatenate(counts)).to(logits.device)
    weight_of = np.repeat(np.array(weights, dtype=np.float32), lengths, axis=0)
    repetition, frequency, presence = torch.from_numpy(weight_of).to(logits.device).unbind(1)
    flat = logits.view(-1)
    value = flat[where]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - frequency * count_of - presence * (count_of > 0)
    flat[where] = value


def _choose(logits: torch.Tensor, rows: Sequence[Row], *, may_wait: bool) -> torch.Tensor:
    """Return each row's token [R] int64: the most likely one if greedy, else a draw."""
    greedy = [i for i, row in enumerate(rows) if row.state.params.greedy]
    if len(greedy) == len(rows):
        return argmax(logits)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    # A row with a small top_k needs no pass over the vocabulary beyond finding its candidates.
    most = min(MAX_CANDIDATES, logits.shape[1] - 1)
    narrow = [
        i for i, row in enumerate(rows) if not row.state.params.greedy and 0 < row.state.params.top_k <= most
    ]
    wide = sorted(set(range(len(rows))) - {*greedy, *narrow})
    if greedy:
        token_ids.index_copy_(0, upload(greedy, logits.device), argmax(_select(logits, greedy)))
    if narrow:
        chosen, is_enough = _draw_narrow(_select(logits, narrow), [rows[i] for i in narrow])
        if may_wait:
            wide = sorted(wide + [i for i, done in zip(narrow, is_enough.tolist(), strict=True) if not done])
        else:
            whole = _draw_wide(_select(logits, narrow), [rows[i] for i in narrow], may_wait=False)
            chosen = torch.where(is_enough, chosen, whole)
        token_ids.index_copy_(0, upload(narrow, logits.device), chosen)
    if wide:
        chosen = _draw_wide(_select(logits, wide), [rows[i] for i in wide], may_wait=may_wait)
        token_ids.index_copy_(0, upload(wide, logits.device), chosen)
    return token_ids


def _select(logits: torch.Tensor, group: Sequence[int]) -> torch.Tensor:
    """Return the rows of `group`, ascending; the same tensor if these are all."""
    return logits if len(group) == len(logits) else logits.index_select(0, upload(group, logits.device))


def _draw_narrow(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw for rows with a top_k of at most MAX_CANDIDATES: tokens [R], and whether candidates sufficed."""
    params = [row.state.params for row in rows]
    values, ids = candidates(logits, max(p.top_k for p in params) + 1)
    weights = torch.exp(_divide(values, params) - _divide(values[:, :1], params))
    # Among candidates no filter has to look further: it waits for nothing.
    keep(weights, params, is_sorted=True, may_wait=False)
    # If even the last candidate is kept, equal logits may go on beyond what was fetched.
    is_enough = weights[:, -1] == 0.0
    ids, order = torch.sort(ids, dim=-1)
    columns = draw(weights.gather(1, order), _uniforms(rows, logits.device))
    return ids.gather(1, columns[:, None]).flatten(), is_enough


def _draw_wide(logits: torch.Tensor, rows: Sequence[Row], *, may_wait: bool) -> torch.Tensor:
    """Draw a token for each row [R] from the whole vocabulary."""
    params = [row.state.params for row in rows]
    weights = weights_of(_divide(logits, params))
    keep(weights, params, may_wait=may_wait)
    return draw(weights, _uniforms(rows, logits.device))


def _divide(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the logits [R, C] divided by each row's temperature."""
    if all(p.divisor == 1.0 for p in params):
        return logits
    return logits / upload([p.divisor for p in params], logits.device)[:, None]


def _uniforms(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    return upload([row.uniform for row in rows], device, torch.float64)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[Row], token_ids: torch.Tensor, first: int
) -> list[_Logprobs]:
    """Return log-probabilities for the rows that want them, or none; row 0 is row `first` of the draw."""
    wanted = [(i, num) for i, row in enumerate(rows) if (num := row.state.params.logprobs) is not None]
    if not wanted:
        return []
    where = [i for i, _ in wanted]
    logprobs = torch.log_softmax(_select(logits, where), dim=-1)
    own = logprobs.gather(1, _select(token_ids, where)[:, None]).flatten()
    values, ids = likeliest(logprobs, max(num for _, num in wanted))
    on_host = [one.to("cpu", non_blocking=True) for one in (own, values, ids)]
    return [_Logprobs([(first + i, num) for i, num in wanted], *on_host)]
