"""Decodes whose block tables share leading blocks: their shared KV is read once per step for all of them.

(Cascade attention; Hydragen, arXiv:2402.05099.) A group's queries are stacked and attend to the shared keys
in one pass, each sequence attends to its own keys in another, and the results are joined by log-weights.
Groups are computed from the block tables alone. A sequence is in one group at most: if prefixes branch, the
level that saves most is used. (The CPU kernels, `native/plan.h`, follow the whole tree.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stemma.model.attend.batch import ForwardBatch

MAX_GROUPS = 8
"""Maximum number of groups per step; further ones save least and are ignored."""
MIN_SAVED_KEYS = 1024
"""Minimum number of keys per KV head that a group saves; fewer don't pay for a second pass. A guess: not
measured on a GPU."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences of a batch, by number, that share their first `num_blocks` blocks."""

    members: tuple[int, ...]
    num_blocks: int

    @property
    def num_saved_blocks(self) -> int:
        """Number of block reads that the group saves."""
        return (len(self.members) - 1) * self.num_blocks


def find_groups(batch: ForwardBatch, block_size: int) -> list[PrefixGroup]:
    """Return up to MAX_GROUPS groups of decodes (sequences with one query) that are worth it.

    A shared block is wholly before the queries of all members.
    """
    starts, lens = batch.query_starts, batch.context_lens
    num_full = {
        seq: (lens[seq] - 1) // block_size
        for seq in range(batch.num_seqs)
        if starts[seq + 1] - starts[seq] == 1 and lens[seq] > block_size
    }
    if len(num_full) < 2:
        return []
    tables: npt.NDArray[np.int32] = batch.block_tables.numpy()
    first = tables[list(num_full), 0].tolist()
    if len(set(first)) == len(first):
        return []
    least = -(-MIN_SAVED_KEYS // block_size)
    found = [g for g in _best(list(num_full), 0, tables, num_full) if g.num_saved_blocks >= least]
    return sorted(found, key=lambda g: -g.num_saved_blocks)[:MAX_GROUPS]


def _best(
    seqs: list[int], depth: int, tables: npt.NDArray[np.int32], num_full: dict[int, int]
) -> list[PrefixGroup]:
    """Group sequences that agree on all blocks before `depth` so that the most reads are saved."""
    branches: dict[int, list[int]] = {}
    for seq in seqs:
        if num_full[seq] > depth:
            branches.setdefault(int(tables[seq, depth]), []).append(seq)
    groups: list[PrefixGroup] = []
    for members in branches.values():
        if len(members) < 2:
            continue
        limit = min(num_full[seq] for seq in members)
        rows = tables[members, depth:limit]
        differs = (rows != rows[0]).any(axis=0)
        common = depth + (int(differs.argmax()) if differs.any() else limit - depth)
        whole = PrefixGroup(tuple(members), common)
        parts = _best(members, common, tables, num_full) if len(members) > 2 else []
        saves_more = sum(part.num_saved_blocks for part in parts) > whole.num_saved_blocks
        groups += parts if saves_more else [whole]
    return groups


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Groups as the kernels read them: S sequences, M members in all, G groups; int32 on the device."""

    first_keys: torch.Tensor
    """[S]: keys that the pass over the group reads for the sequence; its own pass starts after them."""
    member_of: torch.Tensor
    """[S]: its place in `members`, -1 for none."""
    members: torch.Tensor
    """[M + 1]: numbers of sequences, group after group; the last entry is padding."""
    member_starts: torch.Tensor
    """[G + 1]; a group may be empty."""
    num_keys: torch.Tensor
    """[G]: keys that the members share."""
    max_members: int
    """Maximum number of members of a group."""
    num_groups: int
    """G."""

    @classmethod
    def of(
        cls, groups: Sequence[PrefixGroup], num_seqs: int, block_size: int, device: torch.device
    ) -> SharedTensors:
        """Copy groups to the device asynchronously."""
        host = SharedArrays(num_seqs, max(1, len(groups)))
        host.fill(groups, block_size)
        packed = torch.from_numpy(host.packed).to(device, non_blocking=True)
        return host.tensors(packed, max((len(group.members) for group in groups), default=1))


class SharedArrays:
    """The same on the host, packed so that one copy transfers it."""

    def __init__(self, num_seqs: int, num_groups: int) -> None:
        self._num_groups = num_groups
        sizes = (num_seqs, num_seqs, num_seqs + 1, num_groups + 1, num_groups)
        self._ends = np.cumsum(sizes).tolist()
        self.packed: npt.NDArray[np.int32] = np.zeros(sum(sizes), dtype=np.int32)

    def fill(self, groups: Sequence[PrefixGroup], block_size: int) -> None:
        """Write the groups; missing ones are empty."""
        first_keys, member_of, members, member_starts, num_keys = np.split(self.packed, self._ends[:-1])
        self.packed[:] = 0
        member_of[:] = -1
        end = 0
        for number, group in enumerate(groups):
            seqs = list(group.members)
            first_keys[seqs] = num_keys[number] = group.num_blocks * block_size
            member_of[seqs] = np.arange(end, end + len(seqs))
            members[end : end + len(seqs)] = seqs
            end += len(seqs)
            member_starts[number + 1] = end
        member_starts[len(groups) + 1 :] = end

    def tensors(self, packed: torch.Tensor, max_members: int) -> SharedTensors:
        """Return the parts of a tensor with the layout of `packed`; no group has more than `max_members`."""
        begins = [0, *self._ends[:-1]]
        first_keys, member_of, members, member_starts, num_keys = (
            packed[begin:end] for begin, end in zip(begins, self._ends, strict=True)
        )
        return SharedTensors(
            first_keys, member_of, members, member_starts, num_keys, max_members, self._num_groups
        )
