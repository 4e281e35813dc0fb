"""What ranks exchange within a step: partial sums, added in the order of ranks.

A collective's own sum would add in an order that depends on its algorithm. Here every rank gets all partial
sums and adds them in the order of ranks, in float32, then rounds once. So all ranks compute the same bits,
and a row's result depends on nothing but the row: what is cached stays exact.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, FileStore

from stemma.model.parallel.share import Share

LOAD_TIMEOUT_S = 900.0
"""Wait for another rank while weights are read and packed; one that has ended is noticed at once."""
STEP_TIMEOUT_S = 60.0
"""Wait for another rank within a step."""


class RankGroup:
    """All ranks of a model, from one of them. Its methods are collective: each rank calls them in turn.

    On CPU the ranks talk by gloo, over loopback. On CUDA by NCCL: written, not yet run on a GPU.
    """

    def __init__(self, share: Share, meeting_file: Path, device_type: str) -> None:
        """Meet the other ranks at a file that doesn't exist before. Raises RuntimeError if one is missing."""
        self.share = share
        self._timeout = timedelta(seconds=LOAD_TIMEOUT_S)
        store = FileStore(str(meeting_file), share.size)
        self._group: Any
        if device_type == "cuda":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = self._timeout
            self._group = nccl(store, share.rank, share.size, options)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._group = gloo(store, share.rank, share.size, options)

    def end_loading(self) -> None:
        """From now on wait for other ranks only as long as a step may take."""
        self._timeout = timedelta(seconds=STEP_TIMEOUT_S)

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors of this shape, in the dtype of `partial`.

        Raises RuntimeError if a rank has ended or doesn't answer in time.
        """
        own = partial.float().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.share.size)]
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._group.allgather([parts], [own], options).wait()
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)
