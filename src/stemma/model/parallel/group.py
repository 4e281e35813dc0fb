"""Exchange between ranks within a step: partial sums, added in the order of ranks; queries, keys and results.

A collective's own sum would add in an order that depends on its algorithm. Here every rank gets all partial
sums and adds them in the order of ranks, in float32, then rounds once. So all ranks compute the same bits,
and a row's result depends on nothing but the row: what is cached stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, FileStore, PrefixStore

from stemma.model.parallel.share import Share

LOAD_TIMEOUT_S = 900.0
"""Wait for another rank while weights are read and packed; one that has ended is noticed at once."""
STEP_TIMEOUT_S = 60.0
"""Wait for another rank within a step."""


@dataclass(frozen=True, slots=True)
class Passing:
    """A tensor on its way to the next rank, and another's on its way here."""

    work: Any
    outgoing: torch.Tensor
    """Kept until it has arrived."""
    arriving: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return what arrived. Raises RuntimeError if a rank has ended or doesn't answer in time."""
        self.work.wait()
        return self.arriving


class RankGroup:
    """All ranks of a model, from one of them. Its methods are collective: each rank calls them in turn.

    Those that divide the model are one group, those that divide the tokens another. On CPU the ranks talk by
    gloo, over loopback. Elsewhere by NCCL: written, never run.
    """

    def __init__(self, share: Share, meeting_file: Path, device_type: str) -> None:
        """Meet the other ranks at a file that doesn't exist before. Raises RuntimeError if one is missing."""
        self.share = share
        self._timeout = timedelta(seconds=LOAD_TIMEOUT_S)
        store = FileStore(str(meeting_file), share.num_processes)
        self._model_group: Any = None
        self._token_group: Any = None
        if share.size > 1:
            meeting = PrefixStore(f"model-{share.context_rank}", store)
            self._model_group = self._meet(meeting, share.rank, share.size, device_type)
        if share.context_size > 1:
            meeting = PrefixStore(f"tokens-{share.rank}", store)
            self._token_group = self._meet(meeting, share.context_rank, share.context_size, device_type)

    def _meet(self, store: PrefixStore, rank: int, size: int, device_type: str) -> Any:
        if device_type != "cpu":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = self._timeout  # noqa: SLF001 - torch has no public name
            return nccl(store, rank, size, options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - as above
        options._timeout = self._timeout  # noqa: SLF001
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        return gloo(store, rank, size, options)

    def end_loading(self) -> None:
        """From now on wait for other ranks only as long as a step may take."""
        self._timeout = timedelta(seconds=STEP_TIMEOUT_S)

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors of all ranks that divide the model, in the dtype of `partial`.

        Raises RuntimeError if a rank has ended or doesn't answer in time.
        """
        own = partial.float().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.share.size)]
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._model_group.allgather([parts], [own], options).wait()
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def exchange(self, parts: Sequence[torch.Tensor], num_rows: Sequence[int]) -> list[torch.Tensor]:
        """Send ``parts[r]`` [n, ...] to rank r of those that divide the tokens; return what came.

        From rank r come ``num_rows[r]`` rows of the same dtype and width. Errors as `add`.
        """
        own = self.share.context_rank
        width = parts[own].shape[1:]
        row_bytes = width.numel() * parts[own].element_size()
        given = [part if rank != own else part[:0] for rank, part in enumerate(parts)]
        incoming = [rows if rank != own else 0 for rank, rows in enumerate(num_rows)]
        outgoing = torch.cat([_bytes(part) for part in given])
        arriving = outgoing.new_empty(sum(incoming) * row_bytes)
        self._all_to_all(
            arriving,
            outgoing,
            [rows * row_bytes for rows in incoming],
            [len(part) * row_bytes for part in given],
        ).wait()
        received = list(torch.split(arriving.view(parts[own].dtype).view(-1, *width), incoming))
        received[own] = parts[own]
        return received

    def pass_on(self, tensor: torch.Tensor) -> Passing:
        """Begin to send a tensor to the next rank, and to receive one of the same shape from the last."""
        own, size = self.share.context_rank, self.share.context_size
        outgoing, arriving = tensor.contiguous(), torch.empty_like(tensor)
        counts_out, counts_in = [0] * size, [0] * size
        counts_out[(own + 1) % size] = counts_in[own - 1] = outgoing.nbytes
        work = self._all_to_all(_bytes(arriving), _bytes(outgoing), counts_in, counts_out)
        return Passing(work, outgoing, arriving)

    def _all_to_all(
        self, arriving: torch.Tensor, outgoing: torch.Tensor, counts_in: list[int], counts_out: list[int]
    ) -> Any:
        options = AllToAllOptions()
        options.timeout = self._timeout
        return self._token_group.alltoall_base(arriving, outgoing, counts_in, counts_out, options)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes [n] uint8, a view if it is contiguous already."""
    return tensor.contiguous().view(-1).view(torch.uint8)
