"""Where the work of a step lies: its rows of the batch and of the logits. Only this module counts them.

The items of a step lie one behind the other, those of one adapter side by side. Some rows of an item give
logits: those of `Scheduled.scored` positions first, which say how likely the prompt was, then the last
`num_logits`, from which tokens are drawn. The logits of all items lie in the order of the items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.core.request import Scheduled, SequenceState
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.sampler import Sampled
from stemma.errors import IntegrityError
from stemma.model.lora.adapter import Adapter


@dataclass(frozen=True, slots=True)
class AdapterRange:
    """The rows that one adapter serves."""

    adapter: Adapter
    rows: range
    """Rows of the batch."""
    logits: range
    """Rows of the logits."""


class Drawn:
    """Tokens drawn for one sequence from the logits of one item: its own, or that of an elder sibling."""

    __slots__ = ("item", "logprobs", "rows", "sequence", "token_ids")

    def __init__(self, item: Scheduled, sequence: SequenceState, rows: range) -> None:
        self.item = item
        self.sequence = sequence
        self.rows = rows
        """Rows of what the sampler returns."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []

    def take(self, sampled: Sampled) -> None:
        """Copy the rows of this sequence."""
        rows = slice(self.rows.start, self.rows.stop)
        self.token_ids = sampled.token_ids[rows]
        self.logprobs = sampled.logprobs[rows]


class StepRows:
    """The layout of one step, made once, when it is scheduled. Whoever needs rows asks it or its items."""

    __slots__ = (
        "adapters",
        "items",
        "num_logits",
        "num_prefill",
        "num_rows",
        "num_scored",
        "query_starts",
        "wants_hidden",
    )

    def __init__(self, plan: Sequence[Scheduled]) -> None:
        """Lay out the items of `plan`: they get their `first_row` and `first_logit` here."""
        keys = [item.sequence.adapter_key for item in plan]
        has_adapters = any(keys)
        self.items: Sequence[Scheduled] = _side_by_side(plan, keys) if has_adapters else plan
        """In the order of their rows."""
        self.query_starts: list[int] = [0]
        """The first row of each item, and the number of rows: what `ForwardBatch` wants."""
        row = logit = num_prefill = num_scored = 0
        self.wants_hidden = False
        """Whether hidden states are made into a vector of a prompt."""
        for item in self.items:
            item.first_row, item.first_logit = row, logit
            pooled = item.sequence.state.pooled
            if pooled is not None and pooled.pooling.needs_hidden:
                self.wants_hidden = True
            row += item.num_tokens
            logit += item.num_logits
            if item.scored:
                num_scored += len(item.scored)
                logit += len(item.scored)
            if item.num_tokens - len(item.draft) > 1:
                num_prefill += item.num_tokens
            self.query_starts.append(row)
        self.num_rows = row
        self.num_logits = logit
        self.num_scored = num_scored
        self.num_prefill = num_prefill
        """Rows of items that compute more than one known token."""
        self.adapters: Sequence[AdapterRange] = list(_adapter_ranges(self.items)) if has_adapters else ()

    @property
    def is_decode(self) -> bool:
        """Whether the step computes one token of each sequence, apart from drafts."""
        return not self.num_prefill

    @property
    def num_context(self) -> int:
        """Tokens before the step's own, the sum over its items."""
        return sum(item.start for item in self.items)

    def write_logits_rows(self, into: npt.NDArray[np.int64]) -> None:
        """Write which rows of the batch give logits to ``into[: num_logits]``."""
        for item in self.items:
            if item.scored:
                logits = item.scored_logits
                into[logits.start : logits.stop] = range(
                    item.row_of(item.scored.start), item.row_of(item.scored.stop)
                )
            logits, end = item.drawn_logits, item.first_row + item.num_tokens
            if len(logits) == 1:
                into[logits.start] = end - 1
            else:
                into[logits.start : logits.stop] = range(end - len(logits), end)

    def drawn(self, siblings: Callable[[SequenceState], Iterable[SequenceState]]) -> list[Drawn]:
        """Return who draws: sequences that want logits, each before `siblings`, which draw from the same.

        Their rows are those of `drawn_from`.
        """
        found: list[Drawn] = []
        first = 0
        for item in self.items:
            if num := item.num_logits:
                for sequence in (item.sequence, *siblings(item.sequence)):
                    found.append(Drawn(item, sequence, range(first, first + num)))
                    first += num
        return found

    def drawn_from(self, logits: torch.Tensor, drawn: Sequence[Drawn]) -> torch.Tensor:
        """Return the logits [R, V] of all `drawn`, one after the other; the same tensor where it is that."""
        if not self.num_scored and (not drawn or drawn[-1].rows.stop == self.num_logits):
            return logits
        return logits[[row for one in drawn for row in one.item.drawn_logits]]

    def unknown(self) -> tuple[list[int], list[int]]:
        """Return the rows of the batch whose token the step before draws, and from which of its logits."""
        found = [(item.first_row, item.source_row) for item in self.items if item.source_row is not None]
        return [row for row, _ in found], [source for _, source in found]

    def check(self) -> None:
        """Raise IntegrityError unless each row belongs to one item, and adapters have theirs (slow)."""
        rows = [row for item in self.items for row in item.rows]
        _agree("rows", rows, range(self.num_rows))
        _agree("first rows", [item.first_row for item in self.items], self.query_starts[:-1])
        logits = [row for item in self.items for row in (*item.scored_logits, *item.drawn_logits)]
        _agree("logits", logits, range(self.num_logits))
        _agree("scored", sum(len(item.scored) for item in self.items), self.num_scored)
        wanted = np.full(self.num_logits, -1, dtype=np.int64)
        self.write_logits_rows(wanted)
        for item in self.items:
            last = item.rows[item.num_tokens - item.num_logits :]
            _agree("drawn", wanted[item.drawn_logits].tolist(), last)
            _agree("scored", wanted[item.scored_logits].tolist(), [item.row_of(p) for p in item.scored])
            if not set(wanted[item.scored_logits].tolist()) <= set(item.rows):
                raise IntegrityError(f"positions {item.scored} are scored, but not computed in the step")
        self._check_adapters()

    def _check_adapters(self) -> None:
        for item in self.items:
            adapter = item.sequence.state.request.adapter
            for name, own in (("rows", item.rows), ("logits", (*item.scored_logits, *item.drawn_logits))):
                for row in own:
                    serving = [one.adapter for one in self.adapters if row in getattr(one, name)]
                    if serving != ([] if adapter is None else [adapter]):
                        raise IntegrityError(f"{name} {row} should have adapter {adapter}, and has {serving}")


def _side_by_side(plan: Sequence[Scheduled], keys: Sequence[str]) -> Sequence[Scheduled]:
    """Return the items with those of one adapter beside each other, in the order of their first ones."""
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return plan if len(order) < 2 else sorted(plan, key=lambda item: order[item.sequence.adapter_key])


def _adapter_ranges(items: Sequence[Scheduled]) -> Iterable[AdapterRange]:
    for _, group in groupby(items, key=lambda item: item.sequence.adapter_key):
        some = list(group)
        first, last = some[0], some[-1]
        if (adapter := first.sequence.state.request.adapter) is not None:
            yield AdapterRange(
                adapter,
                range(first.first_row, last.rows.stop),
                range(first.first_logit, last.drawn_logits.stop),
            )


def _agree(name: str, found: object, expected: object) -> None:
    if isinstance(expected, range | list):
        expected = list(expected)
    if found != expected:
        raise IntegrityError(f"{name} of a step are {found}, not {expected}")
