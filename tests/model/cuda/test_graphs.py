"""Which steps are recorded, and that a replay sees the inputs of its own step: with a fake recorder."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.checkpoints import CONFIGS
from tests.model.cuda.rerun_recorder import FakeRecorder
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda.graphs import BUCKETS, GraphDecoder
from stemma.model.cuda.step_tensors import StepTensors
from stemma.model.foreign.attention import STEP_KEYWORD, AttentionProbe, use_paged_attention

BLOCK_SIZE = 4


class EagerSpy:
    """Counts the batches that are left to it."""

    def __init__(self) -> None:
        self.num_steps = 0

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        self.num_steps += 1
        return torch.zeros(len(batch.logits_rows), 6, dtype=torch.int64)


def fake_run(batch: ForwardBatch, step: StepTensors) -> torch.Tensor:
    """Give back, as logits, all that a row's computation may depend on."""
    last_block = step.block_tables[
        torch.arange(len(batch.token_ids)), (step.context_lens - 1).clamp(min=0) // 4
    ]
    columns = (batch.token_ids, batch.positions, step.slots, step.context_lens, last_block, batch.logits_rows)
    return torch.stack([column.long() for column in columns], 1)


def decodes(num_seqs: int, seed: int = 0, *, num_blocks: int = 3) -> ForwardBatch:
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, num_blocks * BLOCK_SIZE + 1, (num_seqs,), generator=generator)
    tables = torch.randint(1, 100, (num_seqs, num_blocks), generator=generator, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.randint(1, 1000, (num_seqs,), generator=generator),
        positions=lens - 1,
        slots=torch.randint(0, 400, (num_seqs,), generator=generator),
        query_starts=list(range(num_seqs + 1)),
        context_lens=lens.tolist(),
        block_tables=tables,
        logits_rows=torch.arange(num_seqs),
    )


def expected(batch: ForwardBatch) -> torch.Tensor:
    lens = torch.tensor(batch.context_lens)
    tensors = StepTensors(batch.slots, lens, lens, batch.block_tables, (1,) * batch.num_seqs)
    return fake_run(batch, tensors)


class Fixture:
    def __init__(self, error: str | None = None) -> None:
        self.eager, self.recorder = EagerSpy(), FakeRecorder(error)
        self.kv = DeviceKV(KVLayout(1, 2, BLOCK_SIZE, 1, 2, "float32"), 2)
        self.steps: list[StepTensors] = []
        self.decoder = GraphDecoder(self.eager, fake_run, self._make, self.recorder, max_context=12)

    def _make(self, tensors: StepTensors, kv: DeviceKV) -> StepTensors:
        self.steps.append(tensors)
        return tensors

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.decoder.forward(batch, self.kv)


def test_each_step_sees_its_own_inputs() -> None:
    """Batches of changing size share buckets; each gives the answer of its own inputs, padding aside."""
    fixture = Fixture()
    for seed, num_seqs in enumerate((3, 4, 1, 3, 9, 16, 10, 2, 3)):
        batch = decodes(num_seqs, seed)
        assert torch.equal(fixture.forward(batch), expected(batch))
    assert fixture.decoder.recorded == (4, 1, 16, 2)
    assert (fixture.recorder.num_recorded, fixture.recorder.num_replays) == (4, 5)
    assert fixture.eager.num_steps == 0


def test_padding_is_inert() -> None:
    """A padding row writes no KV and sees no context, whatever was there in the step before."""
    fixture = Fixture()
    fixture.forward(decodes(8))
    fixture.forward(decodes(5, 1))
    (step,) = fixture.steps
    assert step.slots[5:].tolist() == [-1] * 3
    assert step.context_lens[5:].tolist() == [0] * 3


def test_other_steps_run_as_usual() -> None:
    """Chunks, rows without logits, too many sequences, tables too wide."""
    fixture = Fixture()
    chunk = decodes(2)
    chunk.query_starts, chunk.context_lens = [0, 2], [2]
    silent = decodes(2)
    silent.logits_rows = torch.tensor([1])
    for batch in (chunk, silent, decodes(BUCKETS[-1] + 1), decodes(2, num_blocks=4)):
        fixture.forward(batch)
    assert fixture.eager.num_steps == 4
    assert fixture.recorder.num_recorded == 0


def test_what_cant_be_recorded_runs_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    """The step that was to be recorded still answers; later ones don't try again; the log says why."""
    fixture = Fixture("operation not permitted when stream is capturing")
    batch = decodes(2)
    assert torch.equal(fixture.forward(batch), expected(batch))
    assert not fixture.decoder.is_enabled
    assert "not permitted" in caplog.text
    fixture.forward(batch)
    assert fixture.eager.num_steps == 1


def test_only_the_bucket_that_lacks_memory_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Told once; other buckets are recorded, also when the end of the recording fails after that."""
    fixture, record = Fixture(), FakeRecorder().record

    def lacking(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if len(run()) < 4:
            return record(run)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    fixture.recorder.record = lacking  # type: ignore[method-assign]
    for num_seqs in (4, 3, 4, 1, 2, 1):
        batch = decodes(num_seqs)
        logits = fixture.forward(batch)
        assert len(logits) == num_seqs
    assert fixture.decoder.is_enabled
    assert fixture.decoder.recorded == (1, 2)
    assert fixture.eager.num_steps == 2
    assert caplog.text.count("no memory to record") == 1


def test_another_kv_starts_afresh() -> None:
    """Graphs hold addresses of the KV they were recorded with."""
    fixture = Fixture()
    fixture.forward(decodes(2))
    fixture.kv = DeviceKV(fixture.kv.layout, 2)
    batch = decodes(2, 1)
    assert torch.equal(fixture.forward(batch), expected(batch))
    assert fixture.recorder.num_recorded == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-sliding", "gemma2"])
def test_dense_models_never_look_at_values(family: str) -> None:
    """Tensors without values raise where a module would branch on one, which no graph can record."""
    with FakeTensorMode(), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
        use_paged_attention(model)
        ids = torch.zeros(1, 4, dtype=torch.int64)
        step = {STEP_KEYWORD: AttentionProbe()}
        output = model(
            input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=torch.arange(4), **step
        )
    assert output.logits.shape[:2] == (1, 4)


def test_a_recorded_step_lives_as_long_as_its_graph() -> None:
    """A real recording holds addresses, not tensors: of a step that is gone it would read what lies there."""

    class Step:
        pass

    class Addresses:
        def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            output = run()
            return lambda: output

    made: list[weakref.ref[Step]] = []

    def make(tensors: StepTensors, kv: DeviceKV) -> Step:
        step = Step()
        made.append(weakref.ref(step))
        return step

    def run(batch: ForwardBatch, step: Step) -> torch.Tensor:
        return torch.zeros(len(batch.logits_rows), 6)

    kv = DeviceKV(KVLayout(1, 2, BLOCK_SIZE, 1, 2, "float32"), 2)
    decoder = GraphDecoder(EagerSpy(), run, make, Addresses(), max_context=12)
    decoder.forward(decodes(2), kv)
    gc.collect()
    assert [step() is not None for step in made] == [True]
    decoder.forward(decodes(2), kv)
    assert len(made) == 1
