"""A limit of the whole process: what KV gets of it, and what keeps steps within it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from stemma import LLM, SamplingParams
from stemma.config.settings import SpeculationSettings, TierSettings
from stemma.engine.budget import working_memory
from stemma.engine.drafts.index_memory import reserved_bytes
from stemma.errors import ConfigError
from stemma.memory.cache.overhead import bytes_per_block, fixed_bytes
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.reserved import planned_bytes
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.weights import PREPARED_BYTES
from stemma.model.opened.abilities import Abilities
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.process_memory import resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_kv_gets_what_the_others_leave(checkpoint: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch):
    """Beside libraries, weights and two steps: tiers, drafts, the policy, and what the index notes."""
    layout = model.layout(16)
    monkeypatch.setattr(working_memory, "resident_bytes", lambda: 1_000_000_000)
    monkeypatch.setattr(working_memory, "step_bytes", lambda *_: 10_000_000)
    tiers = planned_bytes(TierSettings(host_cache=4_000_000), None, layout, "hazard", step_tokens=2048)
    for_kv = 6_000_000 + fixed_bytes("hazard")
    limit = 1_020_000_000 + PREPARED_BYTES + tiers + for_kv
    limit += reserved_bytes(SpeculationSettings())
    llm = LLM(checkpoint, block_size=16, memory_limit=limit, host_cache="4MB")
    kv_bytes = llm.engine.cache.num_blocks * llm.engine.runner.kv.layout.block_bytes
    share = layout.block_bytes / (layout.block_bytes + bytes_per_block(16, "hazard"))
    assert 0 <= 6_000_000 * share - kv_bytes < layout.block_bytes
    assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=4)).pop().completions) == 1


def test_answers_are_the_same_within_a_limit(checkpoint: Path):
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [list(range(3, 40)) * 2, list(range(9, 90)), [4, 5, 6, 4, 5, 6, 4, 5]]
    free = LLM(checkpoint, block_size=16, kv_cache_memory="2MB").generate(prompts, params)
    limited = LLM(checkpoint, block_size=16, memory_limit=resident_bytes() + 10**9, max_num_seqs=4)
    assert [g.completions[0].token_ids for g in limited.generate(prompts, params)] == [
        g.completions[0].token_ids for g in free
    ]


def test_a_limit_that_leaves_nothing_says_what_takes_it(checkpoint: Path):
    with pytest.raises(ConfigError, match=r"libraries and weights take .* nothing is left for KV"):
        LLM(checkpoint, memory_limit="1MB")


def test_a_limit_and_a_size_of_the_cache_exclude_each_other(checkpoint: Path):
    with pytest.raises(ConfigError, match="not both"):
        LLM(checkpoint, memory_limit="2GB", kv_cache_memory="1GB")


class RecordingModel:
    """Keeps the batches that it is given."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.device = torch.device("cpu")
        self.abilities = Abilities()
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        assert kv.layout.block_size == 1
        assert kv.num_blocks == len(batch.token_ids)
        self.batches.append(batch)
        return torch.zeros(len(batch.logits_rows), 7)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "max_len", "lengths"),
    [(10, 3, 100, [8, 1, 1]), (10, 3, 5, [5, 4, 1]), (10, 3, 2, [2, 2, 2]), (3, 3, 9, [1, 1, 1])],
)
def test_the_largest_step(num_tokens: int, num_rows: int, max_len: int, lengths: list[int]):
    model = RecordingModel(max_len)
    working_memory.step_bytes(
        cast(CausalLM, model), KVLayout(1, 2, 16, 1, 4, "float32"), num_tokens, num_rows
    )
    [batch] = model.batches
    assert batch.context_lens == lengths
    assert len(batch.token_ids) == sum(lengths) == batch.query_starts[-1]
    assert batch.logits_rows.tolist() == [end - 1 for end in batch.query_starts[1:]]
    for row, (start, length) in enumerate(zip(batch.query_starts, lengths, strict=False)):
        assert batch.block_tables[row, :length].tolist() == list(range(start, start + length))
        assert torch.equal(batch.positions[start : start + length], torch.arange(length))


def test_the_guard_trims_near_the_limit_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch):
    held = [90]
    trims: list[int] = []
    monkeypatch.setattr(working_memory, "resident_bytes", lambda: held[0])
    monkeypatch.setattr(working_memory, "trim_heap", lambda: trims.append(held[0]))
    guard = working_memory.HeapGuard(100, 20)
    for held[0] in (90, 100, 101, 110, 121, 122, 150):
        guard.check()
    assert trims == [101, 122, 150]


def test_drafts_stop_where_rows_of_logits_end(checkpoint: Path):
    """Eight seats and 32 rows for drafts: no step wants more than 40 rows, and the text stays."""
    settings = {"block_size": 16, "speculation": "prompt_lookup", "speculation_adaptive": False}
    llm = LLM(checkpoint, max_num_seqs=8, memory_limit=resident_bytes() + 10**9, **settings)
    num_rows: list[int] = []
    forward = llm.engine.runner.forward

    def counted(plan):
        logits = forward(plan)
        num_rows.append(len(logits))
        return logits

    llm.engine.runner.forward = counted  # type: ignore[method-assign]
    prompts = [[i, 5, 6, 7, 8] * 12 for i in range(3, 11)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    limited = llm.generate(prompts, params)
    free = LLM(checkpoint, kv_cache_memory="2MB", **settings).generate(prompts, params)
    assert [g.completions[0].token_ids for g in limited] == [g.completions[0].token_ids for g in free]
    assert 8 < max(num_rows) <= 40
