"""A pool's directory on a real file system that is full: what can't be kept is counted and computed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stemma.config.settings import PoolSettings
from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.shared_directory import open_backend
from stemma.model.files.tiny import write_tiny_model
from tests.contracts.block_store_suite import BLOCK_BYTES, chain, keys, read

SIZE = 1 << 20
PROMPT = "The river carries water from the mountains to the sea. " * 8


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, in which nothing is left."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        fill(folder / "other")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    left = SIZE
    with file.open("wb", buffering=0) as filling:
        while left:
            try:
                filling.write(bytes(4096))
            except OSError:
                left = 0


def test_what_finds_no_room_is_counted_and_a_miss(full: Path) -> None:
    settings = PoolSettings(name="directory", deadline_s=5.0)
    store = PoolStore(open_backend({"path": str(full / "pool")}), PoolKeys("tiny"), BLOCK_BYTES, settings)
    blocks = chain("a", 3)
    assert set(store.put_many(blocks)) == {PutResult.NO_SPACE}
    assert store.counters.reasons["no_space"] == 3
    assert read(store, keys(blocks)) == [ReadResult.MISS] * 3
    (full / "other").unlink()
    assert store.put_many(blocks) == [PutResult.STORED] * 3
    other = chain("b", 3)
    assert read(store, keys(other)) == [ReadResult.MISS] * 3
    assert not list(full.rglob(".new-*"))
    store.close()


def test_answers_are_computed_where_the_pool_is_full(full: Path, tmp_path: Path) -> None:
    config = tmp_path / "pool.json"
    config.write_text(json.dumps({"path": str(full / "pool")}))
    model = write_tiny_model(tmp_path / "model")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    texts = []
    for pool in ({}, {"pool": "directory", "pool_config": config}):
        llm = LLM(model, kv_cache_memory="2MB", block_size=16, num_threads=1, **pool)
        texts.append([llm.generate([PROMPT], params)[0].text for _ in range(2)])
        llm.close()
    assert texts[0] == texts[1]
