"""How many adapters take part in steps at a time: seats while requests run, packed matrices beyond that.

A step mixes any number of sequences and at most `max_loras` adapters. A sequence whose adapter has no seat
waits until one is free; others pass it, but for those that take or share a seat and arrived more than the
ageing time after it: else a stream of requests for the adapters that run would keep it waiting for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from stemma.engine.core.request import Scheduled, SequenceState
from stemma.model.lora.adapter import Adapter, AdapterRows


class AdapterSeats:
    """Which of some waiting sequences may start. Made for one round of admission."""

    def __init__(self, max_adapters: int, running: Iterable[SequenceState], ageing_s: float) -> None:
        """`running`: all that hold a seat, those that load included."""
        self._max = max_adapters
        self._ageing_s = ageing_s
        self._seated = {s.adapter_key for s in running if s.adapter_key}
        self._waits_since: float | None = None

    def look_at(self, waiting: Sequence[SequenceState]) -> None:
        """Find the oldest of `waiting` whose adapter has no seat and gets none."""
        if len(self._seated) >= self._max:
            arrivals = [s.arrival for s in waiting if s.adapter_key and s.adapter_key not in self._seated]
            self._waits_since = min(arrivals, default=None)

    def admits(self, sequence: SequenceState) -> bool:
        """Return whether the adapter of a waiting sequence has a seat, or needs none."""
        key = sequence.adapter_key
        if not key:
            return True
        if key not in self._seated:
            return len(self._seated) < self._max
        return self._waits_since is None or sequence.arrival - self._waits_since <= self._ageing_s

    def take(self, sequence: SequenceState) -> None:
        """Note that a sequence runs."""
        if sequence.adapter_key:
            self._seated.add(sequence.adapter_key)


def group_by_adapter(plan: list[Scheduled]) -> list[Scheduled]:
    """Return a step's work with rows of the same adapter beside each other, which `ForwardBatch` needs."""
    order: dict[str, int] = {}
    for item in plan:
        order.setdefault(item.sequence.adapter_key, len(order))
    if len(order) < 2:
        return plan
    return sorted(plan, key=lambda item: order[item.sequence.adapter_key])


class AdapterModel(Protocol):
    """The part of `CausalLM` that packs adapters."""

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return what `AdapterRows` carry."""


class PreparedAdapters:
    """The adapters that steps used last, ready to compute with. One owner, the step loop."""

    def __init__(self, model: AdapterModel, max_adapters: int) -> None:
        self._model = model
        self._max = max_adapters
        self._prepared: OrderedDict[str, object] = OrderedDict()
        self.num_prepared = 0
        """How often an adapter was packed."""

    def rows(self, plan: Sequence[Scheduled]) -> tuple[AdapterRows, ...]:
        """Return which rows of a step's batch belong to which adapter; `plan` is grouped by adapter."""
        if not any(item.sequence.adapter_key for item in plan):
            return ()
        found: list[AdapterRows] = []
        row = logit = 0
        last_key = ""
        for item in plan:
            first, row = row, row + item.num_tokens
            first_logit, logit = logit, logit + item.num_logits
            adapter = item.sequence.state.request.adapter
            key = "" if adapter is None else adapter.key
            if adapter is not None and key == last_key:
                first, first_logit = found[-1].rows[0], found[-1].logits[0]
                found[-1] = AdapterRows(found[-1].prepared, (first, row), (first_logit, logit))
            elif adapter is not None:
                found.append(AdapterRows(self._prepare(adapter), (first, row), (first_logit, logit)))
            last_key = key
        return tuple(found)

    def _prepare(self, adapter: Adapter) -> object:
        prepared = self._prepared.pop(adapter.key, None)
        if prepared is None:
            prepared = self._model.prepare_adapter(adapter)
            self.num_prepared += 1
        self._prepared[adapter.key] = prepared
        while len(self._prepared) > self._max:
            self._prepared.popitem(last=False)  # a step under way holds its own
        return prepared
