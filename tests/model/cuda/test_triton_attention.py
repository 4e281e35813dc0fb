"""The Triton kernels against torch: compiled where there is a CUDA device, else in Triton's interpreter.

The interpreter shows that indices, masks and sums are right; it says nothing of compilation or speed.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests.model.attention_batches import Shape, make_batch
from tests.model.cuda.rerun_recorder import FakeRecorder
from tests.model.paging import PagedSequences

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend import shared_prefix
from stemma.model.attend.attention import AttentionCall, StepContext
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.latent import LatentProjection
from stemma.model.attend.paged import AttentionStep
from stemma.model.attend.shared_prefix import PrefixGroup, SharedTensors
from stemma.model.cuda.execution import TritonDecoder
from stemma.model.cuda.graphs import GraphDecoder
from stemma.model.cuda.step_tensors import StepTensors
from stemma.model.cuda.triton_attention import TritonAttentionStep, launch_shape, split_dim
from stemma.model.foreign.decoder import ModuleDecoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_the_interpreter = pytest.mark.skipif(
    DEVICE == "cuda",
    reason="its models lie on the CPU; test_engine_on_cuda.py runs whole models on the device",
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
WAYS = {"plain": (None, None), "window": (24, None), "soft cap": (None, 5.0), "both": (24, 5.0)}
CASES = {
    "one token": ([1], [1]),
    "decodes of uneven length": ([150, 3, 65, 1], [1] * 4),
    "drafts, chunks and decodes": ([80, 24, 33, 9], [20, 24, 3, 1]),
}
SETTINGS = [
    (Shape(14, 2, 64), torch.float32, "plain"),
    (Shape(14, 2, 64), torch.bfloat16, "both"),
    (Shape(4, 2, 16, block_size=1), torch.float16, "window"),
    (Shape(8, 2, 80, block_size=64), torch.float32, "soft cap"),
    (Shape(4, 4, 24, block_size=20), torch.float32, "both"),
    (Shape(4, 1, 8, block_size=8), torch.float32, "window"),
]


def each_case_and_setting() -> list[Any]:
    """Return all pairs; those are quick in which each setting stands once, and each case twice."""
    quick = {(number, number % len(CASES)) for number in range(len(SETTINGS))}
    return [
        pytest.param(
            *setting,
            case,
            marks=[] if (i, j) in quick else pytest.mark.slow,
            id="-".join(map(str, (*setting, case))),
        )
        for i, setting in enumerate(SETTINGS)
        for j, case in enumerate(CASES)
    ]


def on_device(batch: ForwardBatch, kv: DeviceKV) -> tuple[ForwardBatch, DeviceKV]:
    """Move what the step reads to the device under test."""
    other = DeviceKV(kv.layout, kv.num_blocks, DEVICE)
    other.data.copy_(kv.data)
    for name in ("token_ids", "positions", "slots", "logits_rows"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    return batch, other


def attend(
    call: AttentionCall,
    batch: ForwardBatch,
    kv: DeviceKV,
    size: int,
    *inputs: torch.Tensor,
    groups: list[PrefixGroup] | None = None,
) -> torch.Tensor:
    shared = None
    if groups:
        shared = SharedTensors.of(groups, batch.num_seqs, kv.layout.block_size, kv.device)
    tensors = StepTensors.of(batch, kv.device, shared)
    step = TritonAttentionStep(tensors, kv, batch=batch, num_multiprocessors=size)
    return step.attend(call, *inputs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("shape", "dtype", "way", "case"), each_case_and_setting())
def test_equals_torch(shape: Shape, dtype: torch.dtype, way: str, case: str) -> None:
    """Output and the KV written are those of the torch path, whether contexts are cut or not."""
    batch, kv = on_device(*make_batch(shape, *CASES[case], 0, dtype))
    num_tokens = len(batch.positions)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    new = torch.randn(2, num_tokens, shape.num_kv_heads, shape.head_dim, generator=generator)
    query, new = query.to(DEVICE, dtype), new.to(DEVICE, dtype)
    call = AttentionCall(0, shape.head_dim**-0.5, *WAYS[way], None)
    before = kv.data.clone()
    expected = AttentionStep(batch, kv).attend(call, query, new[0], new[1])
    written = kv.data.clone()
    for num_multiprocessors in (1, 4):
        kv.data.copy_(before)
        output = attend(call, batch, kv, num_multiprocessors, query, new[0], new[1])
        torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=0)
        assert torch.equal(kv.data, written)


SHARED_CASES = {
    "all share": ([50, 70, 37, 33], [1] * 4, [PrefixGroup((0, 1, 2, 3), 4)]),
    "two groups, one alone, a draft and a chunk": (
        [70, 40, 33, 66, 80, 9, 60, 50],
        [1, 1, 1, 1, 1, 1, 3, 20],
        [PrefixGroup((1, 3), 4), PrefixGroup((4, 0, 2), 3)],
    ),
    "more rows than a tile has": ([20 + n for n in range(20)], [1] * 20, [PrefixGroup(tuple(range(20)), 2)]),
}


SHARED_SETTINGS: list[tuple[Shape, torch.dtype, str, Collection[str]]] = [
    (Shape(14, 2, 64, block_size=8), torch.float32, "plain", SHARED_CASES),
    (Shape(14, 2, 64, block_size=8), torch.bfloat16, "soft cap", SHARED_CASES),
    (Shape(2, 2, 24, block_size=8), torch.float32, "plain", [*SHARED_CASES][1:]),
    (Shape(4, 1, 8, block_size=8), torch.float16, "window", ["all share"]),
]
"""Last the cases that are slow."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "way", "case"),
    [
        pytest.param(
            *(shape, dtype, way, case),
            marks=[pytest.mark.slow] * (case in slow),
            id=f"{shape}-{dtype}-{way}-{case}",
        )
        for shape, dtype, way, slow in SHARED_SETTINGS
        for case in SHARED_CASES
    ],
)
def test_shared_prefixes_equal_torch(shape: Shape, dtype: torch.dtype, way: str, case: str) -> None:
    """One pass over a group's prefix and one over the rest give what a pass over all gives."""
    lens, queries, groups = SHARED_CASES[case]
    batch, kv = make_batch(shape, lens, queries, 0, dtype)
    for group in groups:
        first = group.members[0]
        for other in group.members[1:]:
            batch.block_tables[other, : group.num_blocks] = batch.block_tables[first, : group.num_blocks]
    batch, kv = on_device(batch, kv)
    num_tokens = len(batch.positions)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator).to(DEVICE, dtype)
    new = torch.randn(2, num_tokens, shape.num_kv_heads, shape.head_dim, generator=generator)
    new = new.to(DEVICE, dtype)
    call = AttentionCall(0, shape.head_dim**-0.5, *WAYS[way], None)
    expected = AttentionStep(batch, kv).attend(call, query, new[0], new[1])
    for num_multiprocessors in (1, 8):
        output = attend(call, batch, kv, num_multiprocessors, query, new[0], new[1], groups=groups)
        torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=0)
    if way != "window":
        # It is these passes that were tested: with a wrong group the result is wrong.
        wrong = [PrefixGroup(group.members[::-1], group.num_blocks + 1) for group in groups]
        output = attend(call, batch, kv, 1, query, new[0], new[1], groups=wrong)
        assert (output - expected).abs().max() > 0.05


def test_shared_latents_equal_torch() -> None:
    """MLA: absorbed decodes over a shared prefix."""
    heads, nope, value_dim, rank, rope = 4, 16, 12, 32, 8
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(heads * (nope + value_dim), rank, generator=generator).to(DEVICE)
    latent = LatentProjection(weight, nope_dim=nope, rope_dim=rope, value_dim=value_dim)
    batch, kv = make_batch(Shape(1, 1, rank + rope), [70, 40, 65, 50], [1] * 4, 2, torch.float32)
    kv_latent = DeviceKV(KVLayout(1, 1, 16, 1, rank + rope, "float32"), kv.num_blocks)
    kv_latent.data.copy_(kv.data[:, :, :1])
    batch, kv = on_device(batch, kv_latent)
    query = torch.randn(4, heads, nope + rope, generator=generator).to(DEVICE)
    key = torch.randn(4, 1, rank + rope, generator=generator).to(DEVICE)
    call = AttentionCall(0, 0.2, None, None, latent)
    expected = AttentionStep(batch, kv).attend(call, query, key, key[..., :rank])
    groups = [PrefixGroup((0, 1, 2, 3), 2)]
    output = attend(call, batch, kv, 8, query, key, key[..., :rank], groups=groups)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rank", "rope"), [(32, 8), (24, 8)], ids=["values are the keys' main part", "values loaded apart"]
)
def test_latent_equals_torch(rank: int, rope: int) -> None:
    """MLA: absorbed decodes and short chunks, and a long chunk that is expanded, in one step."""
    heads, nope, value_dim = 4, 16, 12
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(heads * (nope + value_dim), rank, generator=generator).to(DEVICE)
    latent = LatentProjection(weight, nope_dim=nope, rope_dim=rope, value_dim=value_dim)
    assert 5 <= latent.max_absorbed_queries < 60
    batch, kv = make_batch(Shape(1, 1, rank + rope), [70, 40, 65, 1], [5, 1, 60, 1], 0, torch.float32)
    kv_latent = DeviceKV(KVLayout(1, 1, 16, 1, rank + rope, "float32"), kv.num_blocks)
    kv_latent.data.copy_(kv.data[:, :, :1])
    batch, kv = on_device(batch, kv_latent)
    num_tokens = len(batch.positions)
    query = torch.randn(num_tokens, heads, nope + rope, generator=generator).to(DEVICE)
    key = torch.randn(num_tokens, 1, rank + rope, generator=generator).to(DEVICE)
    call = AttentionCall(0, 0.2, None, None, latent)
    expected = AttentionStep(batch, kv).attend(call, query, key, key[..., :rank])
    for num_multiprocessors in (1, 8):
        output = attend(call, batch, kv, num_multiprocessors, query, key, key[..., :rank])
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_padding_rows_write_nothing() -> None:
    """A row with slot -1 and no context leaves the KV alone and gives zeros."""
    batch, kv = on_device(*make_batch(Shape(2, 1, 16), [5, 9], [1, 1], 0, torch.float32))
    tensors = StepTensors.of(batch, kv.device)
    tensors.slots[1], tensors.context_lens[1] = -1, 0
    before = kv.data.clone()
    row = torch.ones(2, 2, 16, device=DEVICE)
    step = TritonAttentionStep(tensors, kv, batch=None, num_multiprocessors=2)
    output = step.attend(AttentionCall(0, 0.25, None, None, None), row, 3 * row[:, :1], row[:, :1])
    assert not output[1].any()
    changed = (kv.data != before).any(dim=-1).nonzero()
    assert len(changed) == 2  # key and value of the first row, one token of one head


def test_launch_shapes() -> None:
    """Little work is cut in pieces, much is not; wide keys get smaller tiles."""
    few = launch_shape([7], 2, 128, 264)
    assert (few.block_m, few.block_n, few.num_splits) == (16, 64, 64)
    assert launch_shape([7] * 132, 2, 128, 264).num_splits == 1
    assert launch_shape([7 * 2048], 2, 128, 264).block_m == 128
    wide = launch_shape([128], 1, 1152, 264)
    assert (wide.block_m, wide.block_n) == (64, 32)
    assert [split_dim(n) for n in (64, 576, 80, 24, 8)] == [(64, 0), (512, 64), (64, 16), (16, 16), (16, 0)]


@pytest.mark.slow
@in_the_interpreter
@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "deepseek-v3"))]
)
def test_decoders_equal_torch(family: str, load_family) -> None:
    """A whole model: chunks, then decodes through padded, refilled inputs of recorded steps."""
    _, reference = load_family(family, "float32", "torch")
    modules = reference.decoder
    assert isinstance(modules, ModuleDecoder)
    triton = TritonDecoder(modules, 2)
    recorder = FakeRecorder()
    graphs = GraphDecoder(triton, modules.run, triton.decode_step, recorder, max_context=64)
    model = copy(reference)
    model.decoder = graphs
    prompts = [list(range(start, start + length)) for start, length in ((5, 29), (40, 30), (90, 30))]
    ours, theirs = PagedSequences(model, prompts), PagedSequences(reference, prompts)
    for one in (ours, theirs):
        one.step([(0, 26), (1, 20), (2, 1)])
        one.step([(1, 7), (2, 26), (0, 1)])
        one.finish(1)
    assert recorder.num_replays > 0
    for got, wanted in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-3)


@in_the_interpreter
@pytest.mark.slow  # the interpreter takes two minutes; the parts of it run above
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "deepseek-v3"])
def test_decoders_share_prefixes(family: str, load_family, monkeypatch) -> None:
    """A whole model whose decodes share blocks: beside a chunk, then recorded, as groups come and go."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_KEYS", 8)
    _, reference = load_family(family, "float32", "torch")
    modules = reference.decoder
    assert isinstance(modules, ModuleDecoder)
    triton = TritonDecoder(modules, 2)
    recorder = FakeRecorder()
    shares_prefixes = set()

    def decode_step(tensors: StepTensors, kv: DeviceKV) -> StepContext:
        shares_prefixes.add(tensors.shared is not None)
        return triton.decode_step(tensors, kv)

    graphs = GraphDecoder(triton, modules.run, decode_step, recorder, max_context=64)
    model = copy(reference)
    model.decoder = graphs
    head = list(range(5, 29))
    lengths = (7, 5, 3, 4, 1)
    prompts = [head + [50 + 10 * i + n for n in range(length)] for i, length in enumerate(lengths)]
    prompts[4] = list(range(120, 145))
    ours, theirs = PagedSequences(model, prompts), PagedSequences(reference, prompts)
    for one in (ours, theirs):
        one.step([(0, 26)])
        for target, num_tokens in ((1, 24), (2, 22), (3, 16)):
            one.reuse(0, target, num_tokens)
        one.step([(4, 20), (0, 1), (1, 1), (2, 1), (3, 1)])
        one.finish(1)
    assert shares_prefixes == {False, True}
    assert recorder.num_replays > 4
    for got, wanted in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-3)
