"""An engine over a fused decoder: states are kept, found and brought back from disk, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import hybrids
from tests.model.cuda.lone_columns import columns_are_alone  # noqa: F401 - used by itself
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.cuda.small_fused import CPU, SMALL

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.model.cpu.heads import kv_shape_of
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.families.layout import ModelLayout
from stemma.model.load import loading
from stemma.model.load.fused_loading import named_weights
from stemma.model.load.job import Loaded, LoadJob
from stemma.native.library import load_kernels
from stemma.types import Tier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler"),
]
TIMEOUT_S = 60.0
PROMPT = [5 + 7 * n % 200 for n in range(68)]
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1)


def load_recorded(load: LoadJob, layout: ModelLayout) -> Loaded:
    """In place of the CPU's decoder, what a card would run."""
    weights, dtype = named_weights(load.checkpoint), load.checkpoint.dtype
    decoder = LayoutDecoder(layout, weights, dtype, CPU, max_positions=load.max_model_len)
    model = RecordedDecoder(FusedModel(decoder, CPU), PieceRoom(1, 64), FakeRecorder())
    num_bytes = sum(math.prod(shape) for shape in layout.shapes().values()) * dtype.itemsize
    return Loaded(model, kv_shape_of(layout), "Qwen3_5ForCausalLM", num_bytes, 0)


@contextmanager
def engine(path: Path, **fields: Any) -> Iterator[LLM]:
    options = {"dtype": "bfloat16", "device": "cpu", "block_size": 16, "speculation": "off"}
    llm = LLM(path, **(options | {"load_when": "always", "max_model_len": 128} | fields))
    try:
        yield llm
    finally:
        llm.close()


def answer(llm: LLM) -> tuple[Any, dict[Tier, int]]:
    [one] = llm.generate([PROMPT], PARAMS)
    return (one.completions[0].token_ids, one.completions[0].logprobs), one.cache.cached_by_tier


def test_answers_are_the_same_from_any_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = SMALL | {"linear_num_value_heads": 1, "linear_num_key_heads": 1, "num_hidden_layers": 2}
    fields["layer_types"] = ["linear_attention", "full_attention"]
    path = hybrids.build("qwen3_5_text", tmp_path / "model", **fields)
    monkeypatch.setattr(loading, "load_fused", load_recorded)
    disk = {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": "64MB"}
    with engine(path, enable_prefix_cache=False, max_batch_tokens=40) as llm:
        expected, _ = answer(llm)
    with engine(path, **disk) as llm:
        assert answer(llm) == (expected, {})
        found, hits = answer(llm)
        assert (found, hits) == (expected, {Tier.DEVICE: 64})
        assert llm.engine.cache.below.drain(TIMEOUT_S)
        llm.engine.check()
        model: Any = llm.engine.runner.model
        decoder = model.decoder
        assert isinstance(decoder, RecordedDecoder)
        assert {1, 4, 96} <= {*decoder.recorded}
    with engine(path, **disk) as llm:
        found, hits = answer(llm)
        assert (found, hits) == (expected, {Tier.DISK: 64})
        assert torch.isfinite(llm.engine.runner.kv.floats).all()
