"""Block keys are a format: other machines, processes and later versions must compute the same bytes."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.prefix.keys import KeySpace, Namespace, chain_keys, fingerprints, partial_key
from stemma.types import BlockKey

SPACE = KeySpace("model", "bf16 layers=2", 4)
TOKENS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, -1], dtype=np.int32)

PROGRAM = """
import numpy as np
from stemma.prefix.keys import KeySpace, Namespace, chain_keys, fingerprints, partial_key
root = KeySpace("model", "bf16 layers=2", 4).root(Namespace(salt="s\\u00e9", adapter="a"))
tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, -1], dtype=np.int32)
keys = chain_keys(root, tokens, 4)
print(root.hex(), *[key.hex() for key in keys], partial_key(keys[-1], tokens[8:]).hex(),
      *fingerprints(keys).tolist())
"""


def test_keys_are_equal_in_every_process() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    root = SPACE.root(Namespace(salt="sé", adapter="a"))
    keys = chain_keys(BlockKey(root), TOKENS, 4)
    expected = [root.hex(), *(key.hex() for key in keys), partial_key(keys[-1], TOKENS[8:]).hex()]
    assert outputs == {" ".join([*expected, *map(str, fingerprints(keys).tolist())]) + "\n"}


def test_keys_are_what_the_format_says() -> None:
    """Spelled out with hashlib and struct alone, and pinned: a change breaks every stored block."""
    fields = [b"stemma", b"1", b"model", b"bf16 layers=2", b"4", b"adapter", b"salt"]
    root = hashlib.sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()
    first = BlockKey(hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest())
    second = BlockKey(hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 8)).digest())
    last = hashlib.sha256(second + struct.pack("<2i", 9, -1)).digest()
    assert SPACE.root(Namespace(salt="salt", adapter="adapter")) == root
    assert chain_keys(BlockKey(root), TOKENS, 4) == [first, second]
    assert partial_key(second, TOKENS[8:]) == last
    assert fingerprints([first, second]).tolist() == list(struct.unpack("<QQ", first[:8] + second[:8]))
    assert root.hex() == "7364c92d5c18176c0c98e68b5f0d00043d421e9ffc061548cbce23425ce49036"
    assert last.hex() == "97a92bf4c42ef12fda1eb9463f3a5c594e1228e7af116c8b79156110d8b0ab51"


def test_every_field_changes_the_root() -> None:
    spaces = [
        SPACE,
        replace(SPACE, model_fingerprint="other"),
        replace(SPACE, kv_layout="fp32"),
        replace(SPACE, block_size=5),
    ]
    namespaces = [Namespace(), Namespace(salt="x"), Namespace(adapter="x"), Namespace("x", "x")]
    roots = {space.root(namespace) for space in spaces for namespace in namespaces}
    assert len(roots) == len(spaces) * len(namespaces)


@given(
    st.lists(st.text(max_size=4), min_size=4, max_size=4),
    st.lists(st.text(max_size=4), min_size=4, max_size=4),
)
def test_fields_never_run_together(left: list[str], right: list[str]) -> None:
    def root(fields: list[str]) -> bytes:
        return KeySpace(fields[0], fields[1], 4).root(Namespace(fields[2], fields[3]))

    assert (root(left) == root(right)) == (left == right)


@pytest.mark.parametrize("cut", range(3))
def test_a_chain_may_be_continued(cut: int) -> None:
    root = SPACE.root(Namespace())
    keys = chain_keys(BlockKey(root), TOKENS, 4)
    assert keys[:cut] + chain_keys(keys[cut - 1] if cut else root, TOKENS[cut * 4 :], 4) == keys


def test_short_input() -> None:
    root = SPACE.root(Namespace())
    assert chain_keys(root, TOKENS[:3], 4) == []
    assert chain_keys(root, TOKENS[:0], 4) == []
    assert fingerprints([]).tolist() == []
