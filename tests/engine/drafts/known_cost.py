"""A step's cost that is known instead of measured."""

from __future__ import annotations

from stemma.engine.drafts.adaptive import StepCost


class KnownCost(StepCost):
    """A token takes one second, a row `row_s`."""

    token_s = 1.0

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self._row_s = row_s

    @property
    def row_s(self) -> float:
        return self._row_s
