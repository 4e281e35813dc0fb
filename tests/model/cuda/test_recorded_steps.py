"""Steps of any kind through recordings by buckets, in Triton's interpreter: the same as running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from benchmarks.device.headless import HeadlessModules
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.paging import PagedSequences
from transformers import AutoModelForCausalLM

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda import recorded_steps
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.foreign.attention import use_paged_attention
from stemma.model.lora.adapter import LinearShape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its models lie on the CPU")
PROMPTS = [list(range(start, start + length)) for start, length in ((5, 29), (40, 30), (90, 30))]
NUM_BLOCKS, BLOCK_SIZE = 6, 8
"""Blocks of each sequence."""


class OneLayer:
    """Two heads over one KV head, with and without a window, of what a token and its position make."""

    def __init__(self) -> None:
        self.table = torch.randn(50, 3, 2, 16, generator=torch.Generator().manual_seed(0))
        self.num_steps = 0

    def states(self, batch: ForwardBatch, step: ListedAttentionStep) -> torch.Tensor:
        self.num_steps += 1
        made = self.table[batch.token_ids] + batch.positions[:, None, None, None] / 50
        query, key, value = made[:, 0], made[:, 1, :1], made[:, 2, :1]
        outputs = [
            step.attend(AttentionCall(layer, 0.25, window, None, None), query, key, value)
            for layer, window in enumerate((None, 11))
        ]
        return torch.cat(outputs, 1).flatten(1)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, ::2]

    def adapter_step(self, adapters: object, num_rows: int) -> None:
        assert not adapters

    def adaptable(self) -> Mapping[str, LinearShape]:
        return {}

    def prepare_adapter(self, adapter: object) -> object:
        raise AssertionError


class Schedule:
    """Sequences that go on by any number of tokens, in steps of any mixture."""

    def __init__(self, num_seqs: int = 4) -> None:
        self.done = [0] * num_seqs
        blocks = np.random.default_rng(0).permutation(num_seqs * NUM_BLOCKS)
        self.tables = torch.from_numpy(blocks.reshape(num_seqs, -1).astype(np.int32))
        self.kv = DeviceKV(KVLayout(2, 2, BLOCK_SIZE, 1, 16, "float32"), len(blocks))

    def step(self, plan: list[tuple[int, int]]) -> ForwardBatch | None:
        most = NUM_BLOCKS * BLOCK_SIZE
        items = {seq: min(count, most - self.done[seq]) for seq, count in plan}
        items = {seq: count for seq, count in items.items() if count}
        if not items:
            return None
        positions = [torch.arange(self.done[seq], self.done[seq] + count) for seq, count in items.items()]
        slots = [
            self.tables[seq, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            for seq, at in zip(items, positions, strict=True)
        ]
        for seq, count in items.items():
            self.done[seq] += count
        starts = np.cumsum([0, *items.values()]).tolist()
        flat = torch.cat(positions)
        return ForwardBatch(
            token_ids=flat * 7 % 50,
            positions=flat,
            slots=torch.cat(slots),
            query_starts=starts,
            context_lens=[self.done[seq] for seq in items],
            block_tables=self.tables[list(items)],
            logits_rows=torch.tensor(starts[1:]) - 1,
            wants_hidden=True,
        )


PLAN = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 5, 9])), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def as_models_run() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "ROW_BUCKETS", (1, 4, 12))


@settings(max_examples=4, deadline=None)
@given(st.lists(PLAN, min_size=2, max_size=5))
def test_replays_equal_steps_as_they_are(plans: list[list[tuple[int, int]]]) -> None:
    """Random schedules: decodes, drafts, chunks, mixtures, steps that no bucket holds; to the bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_steps, "ROW_BUCKETS", (1, 4, 12))
        ours, plain = Schedule(), Schedule()
        recorded = RecordedDecoder(OneLayer(), PieceRoom(1, 16), FakeRecorder())
        as_it_is = RecordedDecoder(OneLayer(), PieceRoom(2, 16), None)
        for plan in plans:
            batch, same = ours.step(plan), plain.step(plan)
            if batch is None or same is None:
                continue
            assert torch.equal(recorded.forward(batch, ours.kv), as_it_is.forward(same, plain.kv))
            assert batch.hidden is not None
            assert same.hidden is not None
            assert torch.equal(batch.hidden, same.hidden)
            assert torch.equal(ours.kv.data, plain.kv.data)


@pytest.mark.usefixtures("small_buckets")
def test_warm_up_records_all_buckets() -> None:
    """The largest first, with the share done; nothing is written. Later steps only replay."""
    schedule, model, recorder = Schedule(), OneLayer(), FakeRecorder()
    decoder = RecordedDecoder(model, PieceRoom(1, 16), recorder)
    shares: list[float] = []
    decoder.warm_up(schedule.kv, shares.append)
    assert decoder.recorded == (12, 4, 1)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert not schedule.kv.data.any()
    batch = schedule.step([(0, 3), (1, 1)])
    assert batch is not None
    decoder.forward(batch, schedule.kv)
    assert (recorder.num_recorded, recorder.num_replays) == (3, 1)


class Failing(FakeRecorder):
    """Fails where it is to record `num_rows` rows."""

    def __init__(self, num_rows: int, error: Exception) -> None:
        super().__init__()
        self._num_rows, self._failure = num_rows, error

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if len(run()) == self._num_rows:
            raise self._failure
        return super().record(run)


@pytest.mark.usefixtures("small_buckets")
def test_a_bucket_without_memory_is_left_out() -> None:
    """Its steps run as they are, and don't try again; the others are recorded."""
    schedule = Schedule()
    recorder = Failing(4, torch.OutOfMemoryError("out of memory"))
    decoder = RecordedDecoder(OneLayer(), PieceRoom(1, 16), recorder)
    for plan in ([(0, 2)], [(0, 1)], [(1, 3)], [(1, 9)]):
        batch = schedule.step(plan)
        assert batch is not None
        assert decoder.forward(batch, schedule.kv).shape == (1, 32)
    assert decoder.recorded == (1, 12)


@pytest.mark.usefixtures("small_buckets")
def test_a_model_that_cant_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """After the first try, with a word in the log."""
    schedule = Schedule()
    recorder = Failing(1, RuntimeError("not permitted when stream is capturing"))
    decoder = RecordedDecoder(OneLayer(), PieceRoom(1, 16), recorder)
    for _ in range(2):
        batch = schedule.step([(0, 1)])
        assert batch is not None
        decoder.forward(batch, schedule.kv)
    assert decoder.recorded == ()
    assert "not permitted" in caplog.text


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "deepseek-v3"))]
)
def test_decoders_equal_torch(family: str, load_family) -> None:
    """A whole model through its modules: chunks, mixed steps and decodes, recorded and replayed."""
    path, reference = load_family(family, "float32", "torch")
    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    use_paged_attention(hf_model)
    recorder = FakeRecorder()
    model = copy(reference)
    model.decoder = RecordedDecoder(HeadlessModules(hf_model), PieceRoom(1, 16), recorder)
    prompts = [prompt[:16] for prompt in PROMPTS]
    ours, theirs = PagedSequences(model, prompts), PagedSequences(reference, prompts)
    for one in (ours, theirs):
        one.step([(0, 8), (1, 3)])
        one.step([(1, 10), (0, 1), (2, 4)])
        one.step([(2, 9), (0, 1), (1, 1)])
        one.step([(0, 6), (1, 2), (2, 3)])
    assert set(model.decoder.recorded) == {16}
    assert recorder.num_replays == 3
    for got, wanted in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-3)
