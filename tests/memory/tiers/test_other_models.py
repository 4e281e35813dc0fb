"""Prompts that another model left in the disk directory are known, whoever asks, and nothing else is."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stemma.memory.tiers.block_store import BlockPut
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.disk.other_models import OtherModelsOnDisk
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace, chain_keys

BLOCK, BLOCK_BYTES = 4, 512
PROMPT = np.arange(3 * BLOCK + 2, dtype=np.int32)


def leave(root: Path, space: KeySpace, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
    store = DiskStore(root, space, BLOCK_BYTES, 2**23, make_policy("lru"), lambda: 100.0)
    keys = [space.root(namespace)]
    keys += chain_keys(keys[0], PROMPT, space.block_size)
    data = memoryview(bytes(BLOCK_BYTES))
    store.put_many([BlockPut(key, parent, data) for parent, key in pairwise(keys)])
    store.close()


def test_an_older_model_is_found_by_its_key_space(tmp_path: Path):
    leave(tmp_path, KeySpace("old-weights", "bf16", BLOCK))
    own = KeySpace("new-weights", "bf16", BLOCK)
    known = OtherModelsOnDisk(tmp_path, own)
    found = known.find(DEFAULT_NAMESPACE, PROMPT)
    assert found is not None
    assert found[0] == 3 * BLOCK
    assert "old-weights" in found[1]
    assert known.find(Namespace("bob"), PROMPT) is None
    assert known.find(DEFAULT_NAMESPACE, PROMPT[1:]) is None
    itself = OtherModelsOnDisk(tmp_path, KeySpace("old-weights", "bf16", BLOCK))
    assert itself.find(DEFAULT_NAMESPACE, PROMPT) is None


def test_another_block_size_and_layout_are_named(tmp_path: Path):
    leave(tmp_path, KeySpace("weights", "bf16", 2))
    found = OtherModelsOnDisk(tmp_path, KeySpace("weights", "bf16", BLOCK)).find(DEFAULT_NAMESPACE, PROMPT)
    assert found is not None
    assert "blocks of 2 tokens" in found[1]
    found = OtherModelsOnDisk(tmp_path, KeySpace("weights", "fp8", 2)).find(DEFAULT_NAMESPACE, PROMPT)
    assert found is not None
    assert found[1] == "as bf16, now fp8"


def test_damage_and_absence_are_no_error(tmp_path: Path):
    own = KeySpace("new-weights", "bf16", BLOCK)
    assert OtherModelsOnDisk(tmp_path / "none", own).find(DEFAULT_NAMESPACE, PROMPT) is None
    leave(tmp_path, KeySpace("old-weights", "bf16", BLOCK))
    for index in tmp_path.glob("*/index"):
        index.write_bytes(index.read_bytes()[:100])
    assert OtherModelsOnDisk(tmp_path, own).find(DEFAULT_NAMESPACE, PROMPT) is None


def test_what_another_version_left_of_the_model_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, KeySpace("weights", "bf16:avx2-1", BLOCK))
    known = OtherModelsOnDisk(tmp_path, KeySpace("weights", "bf16:avx2-2", BLOCK))
    [told] = known.unread
    assert told.startswith("3 blocks in ")
    assert told.endswith("written as bf16:avx2-1, now bf16:avx2-2")
    assert told in caplog.text
