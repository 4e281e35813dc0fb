"""What `stemma doctor` says of a GPU, with a seam made for the test: each trouble with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from stemma.cli.doctor import card, machine
from stemma.cli.doctor.card import examine_card
from stemma.memory.device.accelerator import Accelerator
from stemma.model.cuda.execution import triton_problem

GB = 10**9


class FakeCard(Accelerator):
    """A card whose memory is the host's."""

    def __init__(
        self, *, capability: tuple[int, int] = (9, 0), free: int = 70 * GB, wait: Any = None
    ) -> None:
        super().__init__(torch.device("cpu"))
        self._capability, self._free, self._wait = capability, free, wait

    @override
    def properties(self) -> Any:
        major, minor = self._capability
        return SimpleNamespace(name="Fake 100", major=major, minor=minor, multi_processor_count=132)

    @override
    def free_bytes(self) -> int:
        if self._free < 0:
            raise torch.AcceleratorError("CUDA error: device is busy\nmore")
        return self._free

    @override
    def total_bytes(self) -> int:
        return 80 * GB

    @override
    def synchronize(self) -> None:
        if self._wait is not None:
            self._wait()


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "COPIED_BYTES", 1 << 22)
    monkeypatch.setattr(card, "LEAST_RATE", 1e6)


def test_a_card_that_works() -> None:
    """The kernel is compiled by Triton, or run by its interpreter; copies are timed both ways."""
    pytest.importorskip("triton")
    found = examine_card(FakeCard(), triton_problem)
    assert found.problems == ()
    assert found.up_rate is not None
    assert found.down_rate is not None
    assert found.text.startswith(
        "Fake 100, capability 9.0, 132 multiprocessors; 70.0 GB free of 80.0 GB; Triton works"
    )
    assert "GB/s up" in found.text


@pytest.mark.parametrize(
    ("fake", "trouble", "words"),
    [
        (FakeCard(capability=(7, 5)), None, "give --dtype float16"),
        (FakeCard(free=10 * GB), None, "70.0 GB of 80.0 GB are taken; nvidia-smi says by whom"),
        (FakeCard(free=-1), None, "can't be used: CUDA error: device is busy; nvidia-smi"),
        (FakeCard(), "CompilationError: no gcc", "Triton: CompilationError: no gcc; without it"),
    ],
)
def test_each_trouble_says_what_to_do(fake: FakeCard, trouble: str | None, words: str) -> None:
    [problem] = examine_card(fake, lambda _device: trouble).problems
    assert words in problem


def test_slow_copies_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "LEAST_RATE", 1e15)
    [problem] = examine_card(FakeCard(), lambda _device: None).problems
    assert "has all its lanes" in problem

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    found = examine_card(FakeCard(wait=fail), lambda _device: None)
    assert "ulimit -l" in found.problems[0]
    assert "copies not measured" in found.text


def test_a_kernel_that_cant_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from stemma.model.cuda import triton_trial

    def fail(_numbers: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler\nplease specify")

    monkeypatch.setattr(triton_trial, "doubled", fail)
    assert triton_problem(torch.device("cpu")) == "RuntimeError: Failed to find C compiler"


def test_without_gpus_nothing_is_tried() -> None:
    assert machine.gpu().cards == ()
