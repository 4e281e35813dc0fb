"""The engine on a device that isn't CUDA's: torch's PrivateUse1 under another name, number 1 of two.

All goes through the seam: no kernel of ours runs there, and no line of ours names the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stemma.config.settings import CacheSettings
from stemma.engine.budget.warm_up import STAGE, step_shapes
from stemma.engine.budget.working_memory import measured_kv_bytes
from stemma.engine.build import build_engine
from stemma.engine.llm import LLM, engine_settings
from stemma.engine.ranks.settings import settings_of_rank, shares_of
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError
from stemma.memory.device.accelerator import accelerator_of, resolve_device
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.device.pinned import host_rows
from stemma.model.cuda.execution import keep_compiled_kernels
from stemma.model.load.loading import load_model
from stemma.types import Tier
from tests import python_device
from tests.checkpoints import build

DEVICE = f"{python_device.NAME}:1"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + (7 * seed + 3 * n) % 200 for n in range(length)] for seed, length in enumerate((90, 33, 7))]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with python_device.registered():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "qwen2"
    build("qwen2", path)
    return path


def answers(path: Path, rounds: int = 1, **settings: Any) -> tuple[list[list[list[int]]], LLM]:
    options = {"dtype": "float32", "kv_cache_memory": "16MB", "block_size": 16, "speculation": "off"}
    options |= {"max_batch_tokens": 64, "max_num_seqs": 4}
    llm = LLM(path, **(options | settings))
    try:
        found = [
            [one.completions[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] for _ in range(rounds)
        ]
        llm.engine.check()
    finally:
        llm.close()
    return found, llm


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_answers_equal_those_of_the_cpu(checkpoint: Path, overlap: str) -> None:
    """Cold and from the cache; every operation was launched on the model's device, by its number."""
    [expected], _ = answers(checkpoint)
    python_device.LAUNCHES.clear()
    found, llm = answers(checkpoint, 2, device=DEVICE, overlap_schedule=overlap)
    assert found == [expected, expected]
    assert set(python_device.LAUNCHES) == {(1, 1)}
    assert llm.engine.stats().cached_tokens_by_tier[Tier.DEVICE] > 0


TIERS: dict[str, tuple[dict[str, Any], Tier]] = {
    "host": ({"host_cache": "8MB"}, Tier.HOST),
    "host, overlapped": ({"host_cache": "8MB", "overlap_schedule": "on"}, Tier.HOST),
    "host, exclusive": ({"host_cache": "8MB", "host_exclusive": True}, Tier.HOST),
    "disk": ({"disk_cache_size": "8MB", "overlap_schedule": "on"}, Tier.DISK),
}


@pytest.mark.parametrize("tiers", TIERS)
def test_blocks_go_down_and_come_back(checkpoint: Path, tmp_path: Path, tiers: str) -> None:
    """Copies run in streams of the device, as late as they may: a step is queued behind those that it reads.

    The loader's thread has the device as its current one.
    """
    [expected], cpu = answers(checkpoint)
    block_bytes = cpu.engine.runner.kv.layout.block_bytes
    python_device.LAUNCHES.clear()
    python_device.USES.clear()
    settings, tier = TIERS[tiers]
    settings = settings | {"kv_cache_memory": 9 * block_bytes, "load_when": "always"}
    if tier is Tier.DISK:
        settings["disk_cache"] = tmp_path
    found, llm = answers(checkpoint, 3, device=DEVICE, **settings)
    assert found == [expected] * 3
    assert set(python_device.LAUNCHES) == {(1, 1)}
    assert llm.engine.stats().cached_tokens_by_tier[tier] > 0
    assert (python_device.USES["steps behind events"] > 0) == (tier is Tier.HOST)


def test_what_gets_another_owner_is_written_after_the_copy() -> None:
    """A load has ended, its request too, and its copies go on: the next owner's KV stays."""
    kv = DeviceKV(KVLayout(1, 2, 16, 1, 8, "float32"), 9, DEVICE)
    copy = DeviceCopy(kv)
    sources = host_rows(4, copy.block_bytes, pin_memory=False).fill_(1)
    python_device.OPERATIONS.clear()
    wait_for = copy.begin([3, 4, 5, 7], list(sources))
    assert wait_for is not None
    assert python_device.OPERATIONS["aten.copy_.default"] == 2  # those that follow each other are one copy
    kv.copy_block_head(1, 4, 16)
    rows = host_rows(3, copy.block_bytes, pin_memory=False)
    copy.out([3, 4, 7], list(rows))
    assert rows.amin(1).tolist() == rows.amax(1).tolist() == [1, 0, 1]
    wait_for()
    copy.out([4], [rows[0]])
    assert int(rows[0].amax()) == 0
    python_device.USES.clear()
    kv.uploads.order()
    assert not python_device.USES


def test_the_bits_name_what_they_depend_on(checkpoint: Path) -> None:
    """So that blocks of one card, or of another path, are not read as those of another."""
    model = load_model(engine_settings(checkpoint, dtype="float32", device=DEVICE).model)
    path = model.numeric_path
    assert path.startswith("pseudo-Pseudo_9:modules:torch-")
    assert path.rsplit(":", 1)[1].removeprefix("no-").startswith("triton")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_experts_are_one_grouped_product(tmp_path: Path, family: str) -> None:
    """A mixture beside the host: the answer of one that computes an expert after the other, as on CPU."""
    build(family, tmp_path)
    [expected], _ = answers(tmp_path)
    python_device.OPERATIONS.clear()
    found, _ = answers(tmp_path, device=DEVICE)
    assert found == [expected]
    assert any("grouped_mm" in name for name in python_device.OPERATIONS)


def test_kv_takes_what_a_measured_step_leaves(checkpoint: Path) -> None:
    """Nine tenths of the card, or the share that was named, less what is taken and what a step adds."""
    for fraction, share in ((None, 0.9), (0.5, 0.5)):
        settings = engine_settings(checkpoint, device=DEVICE, dtype="float32", kv_cache_fraction=fraction)
        model = load_model(settings.model)
        taken, step = python_device.TOTAL_BYTES // 4, 1 << 28
        expected = int(share * python_device.TOTAL_BYTES) - taken - step
        assert measured_kv_bytes(model, settings) == expected
    small = settings.model_copy(update={"cache": CacheSettings(kv_cache_fraction=0.2)})
    with pytest.raises(ConfigError, match="nothing is left for KV"):
        measured_kv_bytes(model, small)


def test_steps_of_all_sizes_run_before_the_first_request(checkpoint: Path) -> None:
    """Largest first, each twice, with a line that says how far it is; none writes beside the KV."""
    told: list[tuple[str, float]] = []
    settings = engine_settings(
        checkpoint, device=DEVICE, dtype="float32", kv_cache_memory="1MB", block_size=16, max_batch_tokens=64
    )
    build_engine(settings, lambda stage, share: told.append((stage, share))).engine.close()
    shares = [share for stage, share in told if stage == STAGE]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    kv = DeviceKV(KVLayout(1, 2, 16, 1, 8, "float32"), 40)
    shapes = list(step_shapes(kv, 512, 64, 64))
    assert shapes[0] == (1, 64, 64)
    decodes = [num_seqs for num_seqs, num_queries, _ in shapes if num_queries == 1]
    assert decodes == sorted(decodes, reverse=True)
    assert {1, 2, 4, 8, 16, 24, 32} <= set(decodes)
    assert all(context <= 512 and -(-context // 16) + n - 1 <= 40 for n, _, context in shapes)


def test_each_rank_has_a_device_of_its_own(checkpoint: Path) -> None:
    settings = engine_settings(checkpoint, device=python_device.NAME, tensor_parallel_size=2)
    devices = [settings_of_rank(settings, share).model.device for share in shares_of(settings)]
    assert devices == [f"{python_device.NAME}:0", f"{python_device.NAME}:1"]


def test_what_triton_compiled_is_kept_with_other_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "stemma" / "triton")


def test_a_device_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.get_device_module(python_device.NAME), "mem_get_info")
    with pytest.raises(ConfigError, match="has no mem_get_info"):
        resolve_device(python_device.NAME)


def test_a_number_that_there_isnt_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds 2, counted from 0"):
        resolve_device(f"{python_device.NAME}:2")


def test_two_cards_of_one_kind_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's: by generation and number of multiprocessors; the host's name is as ever."""
    paths = set()
    for major, minor, count in ((8, 0, 108), (9, 0, 132), (9, 0, 114)):
        properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=count)
        module = SimpleNamespace(get_device_properties=lambda _device, found=properties: found)
        monkeypatch.setattr(torch, "get_device_module", lambda _device, found=module: found)
        accelerator_of.cache_clear()
        paths.add(accelerator_of(torch.device("cuda:0")).numeric_path())
    accelerator_of.cache_clear()
    assert paths == {"cuda-8-0-108", "cuda-9-0-132", "cuda-9-0-114"}
    assert accelerator_of(torch.device("cpu")).numeric_path() == "cpu"
