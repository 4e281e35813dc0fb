"""Settings of the whole session that must stand before a test's imports."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from zlib import crc32

# Threads sleep at barriers: on cores that processes of pytest share, one that spins takes the time of the one
# that it waits for. Read when torch loads the library of OpenMP.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
import torch
from hypothesis import settings

from stemma.model.load.demo import demo_model, missing_packages

# Much of the time of imports and collection would go into looks at what they make, which all stays.
gc.disable()
# One thread a process, children included: on cores that pytest's processes share, threads spend their time
# waiting for each other. Tests of several threads ask for them.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
if not torch.cuda.is_available():
    # Triton reads it when it is imported, and transformers imports Triton if it is there.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin with one thread: what an engine of several threads set would hold for later threads too."""
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what matrices have too much of, and skip what needs what this machine doesn't have."""
    _leave_out(items)
    lacks = {}
    if not torch.cuda.is_available():
        lacks["cuda"] = "needs a CUDA device"
    if missing := missing_packages():
        lacks["real_model"] = f"needs the real model: {' and '.join(missing)} not installed"
    for item in items:
        for marker, reason in lacks.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _leave_out(items: list[pytest.Item]) -> None:
    """Mark as slow all but every N-th variant of a test marked ``one_in(N)``; one asked for alone stays.

    Which one is first follows from the test's name, so that other matrices take other rows of their tables.
    """
    matrices = [item for item in items if item.get_closest_marker("one_in") is not None]
    sizes = Counter(_function(item) for item in matrices)
    seen: Counter[str] = Counter()
    for item in matrices:
        name, marker = _function(item), item.get_closest_marker("one_in")
        assert marker is not None
        step = min(marker.args[0], sizes[name])
        if (seen[name] + crc32(name.encode())) % step:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let garbage be looked for again, but not among what was imported and collected: that is for ever."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end all is garbage; what libraries count is let go."""
    gc.unfreeze()


# The same examples in every run, so that what passed once goes on passing; `make test-all` searches others.
settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile("same")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Return the checkpoint of SmolLM2-135M-Instruct (bfloat16); mark the tests that use it `real_model`."""
    model = demo_model()
    assert model.is_real
    return model.path
