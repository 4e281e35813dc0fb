"""A device that fails for good ends the engine with one clear error each; memory that runs out doesn't."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stemma.engine.async_engine import AsyncEngine
from stemma.engine.build import build_engine
from stemma.engine.llm import LLM, engine_settings
from stemma.errors import DeviceLost, EngineFailed
from stemma.types import FinishReason
from tests import python_device
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt

OPTIONS = {
    "device": python_device.NAME,
    "dtype": "float32",
    "kv_cache_memory": "2MB",
    "block_size": 16,
    "speculation": "off",
    "max_num_seqs": 2,
    "max_batch_tokens": 64,
}
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with python_device.registered():
        yield


def failing(engine: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model's next step fail."""
    model = engine.runner.model
    forward: Callable[..., torch.Tensor] = model.forward

    def fail(*_arguments: Any) -> torch.Tensor:
        monkeypatch.setattr(model, "forward", forward)
        raise error

    monkeypatch.setattr(model, "forward", fail)


def lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each wait for the device fail from now on."""

    def fail(_device: torch.device) -> None:
        raise ILLEGAL

    monkeypatch.setattr(torch.get_device_module(python_device.NAME), "synchronize", fail)


@pytest.mark.parametrize("overlap", ["off", "on"])
async def test_a_lost_device_ends_the_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """Requests that run, that wait, and new ones get the same reason; `/health` and the exit go by it."""
    settings = engine_settings(checkpoint, overlap_schedule=overlap, **OPTIONS)
    engine = AsyncEngine(lambda supervisor: build_engine(settings, supervisor=supervisor), max_waiting=100)
    try:
        lose(monkeypatch)
        failing(engine.parts.engine, ILLEGAL, monkeypatch)
        asked = [collect(engine, request(f"r{n}", prompt(n, 40), greedy(8))) for n in range(5)]
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        assert [type(one) for one in found] == [EngineFailed] * 5
        assert len({str(one) for one in found}) == 1
        assert "device pseudo is lost: CUDA error: an illegal memory access" in str(found[0])
        assert engine.failure is not None
        with pytest.raises(EngineFailed, match="is lost"):
            await collect(engine, request("late", prompt(9, 40), greedy(8)))
    finally:
        engine.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError("odd")]
)
async def test_a_step_that_failed_is_over_with_its_requests(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overlap: str, error: Exception
) -> None:
    """Memory that ran out, or a fault that the device itself survived."""
    settings = engine_settings(checkpoint, overlap_schedule=overlap, **OPTIONS)
    engine = AsyncEngine(lambda supervisor: build_engine(settings, supervisor=supervisor), max_waiting=100)
    try:
        failing(engine.parts.engine, error, monkeypatch)
        [output] = await collect(engine, request("first", prompt(1, 40), greedy(8)))
        assert output.deltas[0].finish_reason is FinishReason.ERROR
        assert str(error)[:10] in str(output.error)
        outputs = await collect(engine, request("second", prompt(1, 40), greedy(8)))
        assert outputs[-1].deltas[0].finish_reason is FinishReason.LENGTH
        assert engine.failure is None
        await engine.check()
    finally:
        engine.close()


def test_without_a_server_the_caller_gets_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint, **OPTIONS)
    lose(monkeypatch)
    failing(llm.engine, ILLEGAL, monkeypatch)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        llm.generate([prompt(1, 20).tolist()], greedy(4))
    llm.close()
