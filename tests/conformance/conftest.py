"""One server over the small seeded model for all clients; forced calls and schemas make its text valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stemma.model.files.tiny import write_tiny_model
from tests.e2e.conftest import start_server


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=96, num_layers=2)
    served, stop = start_server(model, kv_cache_memory="8MB")
    yield served.url
    stop()


@pytest.fixture(scope="package")
def examples() -> Path:
    return Path(__file__).parents[2] / "examples"
