"""A recorder of graphs on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stemma.model.cuda.graphs import GraphRecorder


class FakeRecorder(GraphRecorder):
    """Replays by running again: right only if everything comes from tensors of a fixed place."""

    def __init__(self, error: str | None = None) -> None:
        self.num_recorded = self.num_replays = 0
        self._error = error

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(self._error)
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return run()

        return replay
