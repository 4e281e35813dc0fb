"""A step's inputs on the device: at fixed addresses, so that one recording serves any batch of its size.

Token ids, positions and slots come from the batch, which has them on the device. All that attention needs
stands in one tensor of int32, `numbers`, filled on the host and brought over by one copy of what is used:

    headers of lists, HEADER each | keys that each row sees | states (`state_list.py`)
    | numbers of rows, members of groups | block tables, one behind the other
    | for each list: items, joins, firsts

A header has: where its items stand, their number, where its joins stand, their number, where its firsts do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.pinned import host_rows
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.shared_prefix import find_groups
from stemma.model.cuda.attention_list import ListedRows, ListShape, make_list
from stemma.model.cuda.state_list import StateList, list_states

MANY_ROWS = 512
"""Rows of a step from which on its tiles are large."""
NUM_NUMBERS = 1 << 21
"""Room for numbers: a list takes 6 of an item and 5 of a row, an item for each tile and piece that is cut."""
_LISTS_ROOM = 1 << 19
"""Of them, what is kept for lists."""
MAX_LISTS, HEADER = 16, 16
"""Lists of one step, and int32 of a header: a multiple of 16 is known to be aligned."""
SEEN_AT = MAX_LISTS * HEADER


class StepInputs:
    """Inputs of one step at a time, of up to `max_rows` rows."""

    def __init__(
        self, max_rows: int, device: torch.device, num_programs: int, num_numbers: int = NUM_NUMBERS
    ) -> None:
        """`num_numbers`: int32 that there is room for; `num_programs`: those that work off a list."""
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._axes = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        """Positions along three axes, which agree where a batch has but one."""
        self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self._device = accelerator_of(device)
        # Two by turns: while one is copied, the next step is written to the other.
        self._hosts = host_rows(2, 4 * num_numbers, pin_memory=self._device.pins_memory).view(torch.int32)
        self._copied: list[Any] = [None, None]
        """Events behind the last copies; None: there was none, or it is over."""
        self._turn = 0
        self.max_rows, self._num_programs = max_rows, num_programs
        self._lists: dict[bool, dict[ListShape, int]] = {False: {}, True: {}}
        """By whether they have many rows: the lists that steps read, and where their headers stand."""
        self._rows: ListedRows | None = None
        self._end = 0

    def fill(self, batch: ForwardBatch, num_rows: int, kv: DeviceKV) -> bool:
        """Copy a batch; rows behind it up to `num_rows` are padding. Returns False if there is no room."""
        self._turn = 1 - self._turn
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        if not self._write(batch, list_states(batch, num_rows, kv), num_rows, kv.layout.block_size):
            return False
        num_tokens = len(batch.token_ids)
        targets = [tensor[:num_tokens] for tensor in (self._token_ids, self._slots, *self._axes)]
        axes = [batch.positions] * 3
        if batch.axes is not None:
            axes = list(batch.axes.to(batch.positions.device, non_blocking=True))
        torch._foreach_copy_(targets, [batch.token_ids, batch.slots, *axes], non_blocking=True)
        if num_tokens < num_rows:
            self._slots[num_tokens:num_rows].fill_(-1)
        self._copy(0, self._end)
        return True

    def header_of(self, shape: ListShape) -> int:
        """Return where the header of a list stands. A new one is built for the step that was filled last."""
        rows = self._rows
        assert rows is not None
        lists = self._lists[rows.num_rows >= MANY_ROWS]
        if shape not in lists:
            assert len(lists) < MAX_LISTS, "too many kinds of layers"
            lists[shape] = HEADER * len(lists)
            begin = self._end
            if not self._append(shape, lists[shape]):
                raise RuntimeError(f"the inputs of a step have no room beside {begin} numbers")
            self._copy(0, SEEN_AT)
            self._copy(begin, self._end)
        return lists[shape]

    def batch(self, num_rows: int) -> ForwardBatch:
        """Return the first rows as models read them; what attention needs comes from `numbers`."""
        return ForwardBatch(
            token_ids=self._token_ids[:num_rows],
            positions=self._axes[0, :num_rows],
            slots=self._slots[:num_rows],
            query_starts=[0, num_rows],
            context_lens=[0],
            block_tables=torch.zeros(1, 0, dtype=torch.int32),
            logits_rows=self._axes[0, :0],
            axes=self._axes[:, :num_rows],
        )

    @property
    def num_rows(self) -> int:
        """Rows of the step that was filled last, padding included."""
        assert self._rows is not None
        return self._rows.num_rows

    @property
    def slots(self) -> torch.Tensor:
        """[num_rows] int64: where each row's KV is written; negative: nowhere."""
        return self._slots[: self.num_rows]

    @property
    def states(self) -> StateList:
        """Where recurrent layers find states; at one place in all steps of as many rows."""
        return StateList(self.numbers, SEEN_AT + self.num_rows, self.num_rows)

    def _write(
        self, batch: ForwardBatch, states: npt.NDArray[np.int32], num_rows: int, block_size: int
    ) -> bool:
        """Write what the host knows of a batch."""
        lens = np.array(batch.context_lens, dtype=np.int32)
        groups = find_groups(batch, block_size)
        states_at = SEEN_AT + num_rows
        order_at = states_at + len(states)
        num_members = sum(len(group.members) for group in groups)
        tables_at = order_at + num_rows + num_members
        used = -(-lens // block_size)
        ends = tables_at + np.cumsum(used, dtype=np.int64)
        host = self._host
        self._end = int(ends[-1]) if len(lens) else tables_at
        if self._end + _LISTS_ROOM > len(host):
            return False
        starts = np.array(batch.query_starts, dtype=np.int32)
        at = (ends - used).astype(np.int32)
        self._rows = rows = ListedRows(starts, lens, at, order_at, num_rows, groups, block_size)
        host[SEEN_AT:states_at], host[states_at:order_at] = rows.seen, states
        host[order_at : order_at + num_rows] = np.arange(num_rows)
        host[order_at + num_rows : tables_at] = rows.members
        tables = batch.block_tables.numpy()
        host[tables_at : self._end] = tables[np.arange(tables.shape[1]) < used[:, None]]
        return all(self._append(*each) for each in self._lists[num_rows >= MANY_ROWS].items())

    def _append(self, shape: ListShape, header_at: int) -> bool:
        """Write a list behind the others, and its header."""
        assert self._rows is not None
        made, host = make_list(shape, self._rows, self._num_programs), self._host
        parts = (made.items, made.joins, made.firsts)
        ends = self._end + np.cumsum([part.size for part in parts])
        if ends[-1] > len(host):
            return False
        at = [self._end, *ends[:-1].tolist()]
        for begin, part in zip(at, parts, strict=True):
            host[begin : begin + part.size] = part.reshape(-1)
        host[header_at : header_at + 5] = (at[0], len(made.items), at[1], len(made.joins), at[2])
        self._end = int(ends[-1])
        return True

    @property
    def _host(self) -> npt.NDArray[np.int32]:
        host: npt.NDArray[np.int32] = self._hosts[self._turn].numpy()
        return host

    def _copy(self, begin: int, end: int) -> None:
        self.numbers[begin:end].copy_(self._hosts[self._turn][begin:end], non_blocking=True)
        self._copied[self._turn] = self._device.marked()
