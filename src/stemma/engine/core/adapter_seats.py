"""How many adapters take part in steps at a time: seats while requests run, packed matrices beyond that.

A step mixes any number of sequences and at most `max_loras` adapters. A sequence whose adapter has no seat
waits until one is free; others pass it, but for those that take or share a seat and arrived more than the
ageing time after it: else a stream of requests for the adapters that run would keep it waiting for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from stemma.engine.core.step_rows import AdapterRange
from stemma.model.lora.adapter import Adapter, AdapterRows


class Seated(Protocol):
    """The part of a sequence that its seat depends on."""

    @property
    def adapter_key(self) -> str:
        """Key of its adapter; empty: it needs none."""

    @property
    def arrival(self) -> float:
        """Time when the request arrived, by the engine's clock."""


class AdapterSeats:
    """Which of some waiting sequences may start. Made for one round of admission."""

    def __init__(self, max_adapters: int, running: Iterable[Seated], ageing_s: float) -> None:
        """`running`: all that hold a seat, those that load included."""
        self._max = max_adapters
        self._ageing_s = ageing_s
        self._seated = {s.adapter_key for s in running if s.adapter_key}
        self._waits_since: float | None = None

    def look_at(self, waiting: Sequence[Seated]) -> None:
        """Find the oldest of `waiting` whose adapter has no seat and gets none."""
        if len(self._seated) >= self._max:
            arrivals = [s.arrival for s in waiting if s.adapter_key and s.adapter_key not in self._seated]
            self._waits_since = min(arrivals, default=None)

    def admits(self, sequence: Seated) -> bool:
        """Return whether the adapter of a waiting sequence has a seat, or needs none."""
        key = sequence.adapter_key
        if not key:
            return True
        if key not in self._seated:
            return len(self._seated) < self._max
        return self._waits_since is None or sequence.arrival - self._waits_since <= self._ageing_s

    def take(self, sequence: Seated) -> None:
        """Note that a sequence runs."""
        if sequence.adapter_key:
            self._seated.add(sequence.adapter_key)


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

    def rows(self, ranges: Sequence[AdapterRange]) -> tuple[AdapterRows, ...]:
        """Return the adapters of a step, ready, with their rows."""
        return tuple(
            AdapterRows(
                self._prepare(one.adapter),
                (one.rows.start, one.rows.stop),
                (one.logits.start, one.logits.stop),
            )
            for one in ranges
        )

    def _prepare(self, adapter: Adapter) -> object:
        prepared = self._prepared.pop(adapter.key, None)
        if prepared is None:
            prepared = self._model.prepare_adapter(adapter)
        self._prepared[adapter.key] = prepared
        while len(self._prepared) > self._max:
            self._prepared.popitem(last=False)  # a step under way holds its own
        return prepared
