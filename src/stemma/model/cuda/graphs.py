"""Decode steps recorded as CUDA graphs: one launch instead of about a hundred per step.

A decode-only step is the same sequence of kernels for any lengths, as long as the number of sequences is the
same. So this number is rounded up to a bucket, and inputs are copied into tensors at fixed addresses. Padding
rows write no KV and see no context. The step of a bucket is recorded on its first use: it first runs as
usual, which gives its result and completes what must not happen while recording (compilation, allocations,
plans), and is then recorded without running. All other steps run as usual.

Steps whose sequences share prefixes have their own recordings, valid for any grouping: the kernels read the
groups from tensors, and work for absent groups ends at once.

A step that can't be recorded (a model that branches on values, as loops over routed experts do) fails at the
first try; graphs are then disabled, with a warning in the log. Where only memory ran out, this one bucket
runs as usual from then on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import StepContext
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.shared_prefix import MAX_GROUPS, PrefixGroup, SharedArrays, find_groups
from stemma.model.cuda.step_tensors import StepTensors
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.opened.causal_lm import Decoder

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences that are recorded; padding is always less than half of the rows."""

RunStep: TypeAlias = Callable[[ForwardBatch, StepContext], torch.Tensor]
"""Batch and context -> logits [L, vocab]."""
MakeStep: TypeAlias = Callable[[StepTensors, DeviceKV], StepContext]


class GraphRecorder(Protocol):
    """Records device work."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record the work of `run` without executing it; return a function that replays it into one tensor.

        What `run` reads must live as long as the recording, which holds addresses alone. Raises RuntimeError
        if it can't be recorded.
        """


class CudaGraphRecorder:
    """Records CUDA graphs. They share one memory pool, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record the kernels that `run` starts; return what replays them."""
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:  # torch's own is that of whichever device recorded first in this process
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Other threads may use CUDA to load blocks from lower tiers, so only this thread is restricted.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step."""

    replay: Callable[[], torch.Tensor]
    step: StepContext
    """Owns tensors that the recorded kernels read."""


class DecodeInputs:
    """Tensors at fixed addresses with the inputs of decode steps of up to `max_seqs` sequences."""

    def __init__(self, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_blocks = max_blocks
        self._token_ids = zeros(max_seqs)
        self._positions = zeros(max_seqs)
        self._slots = zeros(max_seqs)
        self._context_lens = zeros(max_seqs, dtype=torch.int32)
        self._block_tables = zeros(max_seqs, max_blocks, dtype=torch.int32)
        self._rows = torch.arange(max_seqs, device=device)
        self._query_starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._groups = SharedArrays(max_seqs, MAX_GROUPS)
        self._shared = torch.from_numpy(self._groups.packed).to(device, copy=True)

    def fill(
        self, batch: ForwardBatch, num_rows: int, groups: Sequence[PrefixGroup] = (), block_size: int = 1
    ) -> None:
        """Copy the decodes of `batch`, and fill the rows after them up to `num_rows` with padding.

        `groups`: prefixes that they share, for steps that use them.
        """
        num_seqs = batch.num_seqs
        if groups:
            self._groups.fill(groups, block_size)
            self._shared.copy_(torch.from_numpy(self._groups.packed), non_blocking=True)
        self._token_ids[:num_seqs].copy_(batch.token_ids, non_blocking=True)
        self._positions[:num_seqs].copy_(batch.positions, non_blocking=True)
        self._slots[:num_seqs].copy_(batch.slots, non_blocking=True)
        lens = torch.zeros(num_rows, dtype=torch.int32)
        lens[:num_seqs] = torch.tensor(batch.context_lens, dtype=torch.int32)
        self._context_lens[:num_rows].copy_(lens, non_blocking=True)
        used = batch.block_tables.shape[1]
        self._block_tables[:num_seqs, :used].copy_(batch.block_tables, non_blocking=True)
        if num_rows > num_seqs:
            self._token_ids[num_seqs:num_rows].zero_()
            self._positions[num_seqs:num_rows].zero_()
            self._slots[num_seqs:num_rows].fill_(-1)

    def tensors(self, num_rows: int, *, has_groups: bool = False) -> StepTensors:
        """Return the first rows as attention reads them."""
        shared = self._groups.tensors(self._shared, num_rows) if has_groups else None
        return StepTensors(
            self._slots[:num_rows],
            self._query_starts[: num_rows + 1],
            self._context_lens[:num_rows],
            self._block_tables[:num_rows],
            (1,) * num_rows,
            shared,
        )

    def batch(self, num_rows: int) -> ForwardBatch:
        """Return the first rows as the modules read them; lengths and tables come from `tensors`."""
        return ForwardBatch(
            token_ids=self._token_ids[:num_rows],
            positions=self._positions[:num_rows],
            slots=self._slots[:num_rows],
            query_starts=list(range(num_rows + 1)),
            context_lens=[0] * num_rows,
            block_tables=self._block_tables[:num_rows],
            logits_rows=self._rows[:num_rows],
        )


class GraphDecoder:
    """Replays recorded steps where they fit, and passes all others to another decoder.

    The logits that `forward` returns may be overwritten by the next call.
    """

    def __init__(
        self, eager: Decoder, run: RunStep, make_step: MakeStep, recorder: GraphRecorder, *, max_context: int
    ) -> None:
        """`max_context`: maximum tokens of a sequence, which sizes the block tables."""
        self._eager = eager
        self._run = run
        self._make_step = make_step
        self._recorder = recorder
        self._max_context = max_context
        self._kv: DeviceKV | None = None
        self._inputs: DecodeInputs | None = None
        self._recordings: dict[tuple[int, bool], Recording] = {}
        """By bucket, and whether prefixes are shared."""
        self._left_out: set[int] = set()
        """Buckets for whose recording there was no memory."""
        self.is_enabled = True
        """False once a step couldn't be recorded."""

    @property
    def recorded(self) -> tuple[int, ...]:
        """Buckets that have a graph, in the order they were recorded."""
        return tuple(bucket for bucket, _ in self._recordings)

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return self._eager.adaptable()

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return the adapter as a step of this decoder uses it."""
        return self._eager.prepare_adapter(adapter)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]."""
        bucket = self._bucket(batch)
        if bucket is None or bucket in self._left_out:
            return self._eager.forward(batch, kv)
        inputs = self._inputs_for(kv)
        if batch.block_tables.shape[1] > inputs.max_blocks:
            return self._eager.forward(batch, kv)
        block_size = kv.layout.block_size
        groups = find_groups(batch, block_size)
        inputs.fill(batch, bucket, groups, block_size)
        recording = self._recordings.get((bucket, bool(groups)))
        if recording is None:
            logits = self._first(bucket, inputs, kv, has_groups=bool(groups))
        else:
            logits = recording.replay()
        return logits[: batch.num_seqs]

    def _bucket(self, batch: ForwardBatch) -> int | None:
        """Return the bucket of a batch of decodes that each want their logits; None for any other batch.

        Graphs are of the base model and give logits alone: a batch with adapters, or one whose hidden states
        are wanted, has none.
        """
        num_seqs = batch.num_seqs
        if not self.is_enabled or batch.adapters or batch.wants_hidden or not 0 < num_seqs <= BUCKETS[-1]:
            return None
        if len(batch.token_ids) != num_seqs or len(batch.logits_rows) != num_seqs:
            return None
        return BUCKETS[bisect_left(BUCKETS, num_seqs)]

    def _inputs_for(self, kv: DeviceKV) -> DecodeInputs:
        """Return the inputs. Graphs hold addresses of `kv`, so another `kv` drops them."""
        if self._inputs is None or self._kv is not kv:
            max_blocks = -(-self._max_context // kv.layout.block_size)
            self._kv, self._inputs = kv, DecodeInputs(BUCKETS[-1], max_blocks, kv.device)
            self._recordings.clear()
        return self._inputs

    def _first(self, bucket: int, inputs: DecodeInputs, kv: DeviceKV, *, has_groups: bool) -> torch.Tensor:
        """Run a step as usual, then record it for the next time."""
        tensors = inputs.tensors(bucket, has_groups=has_groups)
        batch, step = inputs.batch(bucket), self._make_step(tensors, kv)
        logits = self._run(batch, step)
        try:
            replay = self._recorder.record(lambda: self._run(batch, step))
        except RuntimeError as error:
            if lacks_memory(error):
                self._left_out.add(bucket)
                logger.warning(
                    "no memory to record steps of %d sequences, which run as usual: %s", bucket, error
                )
                return logits
            self.is_enabled = False
            self._recordings.clear()
            logger.warning("decode steps of this model can't be recorded as CUDA graphs: %s", error)
        else:
            self._recordings[bucket, has_groups] = Recording(replay, step)
        return logits


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out; the end of the recording may have failed after that, for that reason."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, torch.OutOfMemoryError):
        found = found.__context__
    return found is not None
