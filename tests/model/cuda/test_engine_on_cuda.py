"""The same engine on a GPU: its answers are those of the CPU, with and without graphs and tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import hybrids
from tests.checkpoints import build

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.types import Tier

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    [5 + (7 * seed + 3 * n) % 200 for n in range(length)] for seed, length in enumerate((90, 33, 64, 7, 150))
]
FAMILIES = ("qwen2", "mistral-sliding", "gemma2", "deepseek-v3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def serve(root: Path) -> Iterator[Any]:
    """Return a maker of engines over a family: ``serve("qwen2", device="cpu", ...)``."""
    made: list[LLM] = []

    def make(family: str, **settings: Any) -> LLM:
        path = root / family
        if not path.exists():
            build(family, path)
        options = {"dtype": "float32", "device": DEVICE, "kv_cache_memory": "64MB", "block_size": 16}
        made.append(LLM(path, **(options | settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [one.completions[0].token_ids for one in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_those_of_the_cpu(serve: Any, family: str) -> None:
    """Greedy, float32: all at once, one by one, and again from the cache."""
    expected = answers(serve(family, device="cpu"), PROMPTS)
    llm = serve(family)
    assert answers(llm, PROMPTS) == expected
    assert answers(llm, PROMPTS) == expected
    assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == expected
    assert sum(llm.engine.stats().cached_tokens_by_tier.values()) > 0
    llm.engine.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_change_nothing(serve: Any, family: str) -> None:
    """The same kernels run on the same numbers, recorded or not; also while sequences come and go."""
    eager = serve(family, cuda_graphs=False)
    recorded = serve(family, cuda_graphs=True)
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:3], PROMPTS[:1]):
        assert answers(recorded, prompts) == answers(eager, prompts)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_overlapping_steps_change_nothing(serve: Any, cuda_graphs: bool) -> None:
    """Also where blocks run out, and where tokens are drawn by the device alone."""
    options = {"cuda_graphs": cuda_graphs, "speculation": "off", "max_batch_tokens": 64}
    in_turn = serve("qwen2", overlap_schedule="off", **options)
    ahead = serve("qwen2", overlap_schedule="on", **options)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        assert answers(ahead, prompts) == answers(in_turn, prompts)
    for more in ({"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"logprobs": 2}, {"presence_penalty": 0.5}):
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, **more)
        drawn, expected = ahead.generate(PROMPTS, params), in_turn.generate(PROMPTS, params)
        assert [one.text for one in drawn] == [one.text for one in expected]
    small = serve("qwen2", overlap_schedule="on", kv_cache_memory="1MB", **options)
    assert answers(small, PROMPTS) == answers(in_turn, PROMPTS)
    small.engine.check()
    ahead.engine.check()


@pytest.mark.parametrize("num_prompts", [1, 2, 4])
def test_graphs_in_bfloat16(serve: Any, num_prompts: int) -> None:
    """Numbers of sequences that need no padding: with it, products may round otherwise."""
    prompts = PROMPTS[:num_prompts]
    eager = serve("qwen2", dtype="bfloat16", cuda_graphs=False)
    recorded = serve("qwen2", dtype="bfloat16", cuda_graphs=True)
    for _ in range(2):
        assert answers(recorded, prompts) == answers(eager, prompts)


def test_dense_models_are_recorded(serve: Any) -> None:
    """Decodes of one and of five sequences leave graphs for one and eight rows, and those between."""
    llm = serve("qwen2")
    answers(llm, PROMPTS)
    answers(llm, PROMPTS[:1])
    decoder = llm.engine.runner.model.decoder
    assert decoder.is_enabled
    assert {1, 8} <= set(decoder.recorded)


def test_blocks_come_back_from_the_host(serve: Any) -> None:
    """A device tier far too small for all prompts: they come back from pinned memory, and are right."""
    expected = answers(serve("qwen2", device="cpu"), PROMPTS)
    layout_bytes = serve("qwen2").engine.runner.kv.layout.block_bytes
    llm = serve("qwen2", kv_cache_memory=14 * layout_bytes, host_cache="16MB", load_when="always")
    for _ in range(3):
        assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == expected
    stats = llm.engine.stats()
    assert stats.cached_tokens_by_tier[Tier.HOST] > 0
    assert stats.transfer.loads.num_late_loads == 0
    llm.engine.check()


def test_blocks_come_back_from_disk(serve: Any, tmp_path: Path) -> None:
    """A second engine finds on disk what the first computed."""
    options = {"disk_cache": tmp_path, "disk_cache_size": "64MB", "load_when": "always"}
    expected = answers(serve("qwen2", device="cpu"), PROMPTS)
    first = serve("qwen2", **options)
    assert answers(first, PROMPTS) == expected
    first.close()
    second = serve("qwen2", **options)
    assert answers(second, PROMPTS) == expected
    assert second.engine.stats().cached_tokens_by_tier[Tier.DISK] > 0


def test_memory_is_pinned(serve: Any) -> None:
    """Copies run beside steps only if the host's side is pinned."""
    llm = serve("qwen2", host_cache="1MB")
    arena = torch.frombuffer(llm.engine.cache.below.stores[0].memory, dtype=torch.uint8)
    assert torch.device(DEVICE).type != "cuda" or arena.is_pinned()


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_recurrent_layers_give_the_same_answers_from_any_tier(family: str, tmp_path: Path) -> None:
    """By our kernels alone: cold, all at once, from checkpoints and from disk; logprobs to the bit."""
    path = hybrids.build(family, tmp_path / "model")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"dtype": "bfloat16", "device": DEVICE, "gpu_path": "fused"}
    options["kv_cache_memory"] = "64MB"
    options |= {"disk_cache": tmp_path / "disk", "disk_cache_size": "64MB", "load_when": "always"}

    def served(**more: Any) -> list[list[Any]]:
        llm = LLM(path, **(options | {"block_size": 16} | more))
        try:
            rounds = [llm.generate(PROMPTS, params) for _ in range(2)]
            rounds.append([llm.generate([prompt], params)[0] for prompt in PROMPTS])
            llm.engine.check()
            return [[(a.completions[0].token_ids, a.completions[0].logprobs) for a in one] for one in rounds]
        finally:
            llm.close()

    found = [*served(enable_prefix_cache=False, disk_cache=None), *served(max_batch_tokens=64), *served()]
    assert all(one == found[0] for one in found)
