"""Adapters, recurrent layers, images, batches: receipts of all are found the same, and drafts do it fast."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from packages.receipts.tests.kinds import pictures, texts
from packages.receipts.tests.signing import signing, verified_here
from tests import checkpoints, hybrids
from tests.adapters import build_adapter
from tests.engine.conftest import harness, model, tokenizer
from tests.vision_checkpoints import make_vision_checkpoint, picture

from stemma.engine.sampling.params import SamplingParams
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma_receipts.known_answers import KnownAnswers

__all__ = ["harness", "model", "tokenizer"]


def test_adapters(tmp_path: Path):
    path = checkpoints.build("qwen2", tmp_path / "plain")
    sides = {name: build_adapter(path, tmp_path / name, seed=n) for n, name in enumerate(("one", "two"))}
    lora = ",".join(f"{name}={folder}" for name, folder in sides.items())
    with signing(path, tmp_path, lora=lora) as server:
        receipts = list(texts(server, 8, ["one", "two"]))
    assert verified_here(server, receipts, tmp_path, adapters=sides) == ["same"] * 8
    found = verified_here(server, receipts, tmp_path, adapters={"one": sides["one"]})
    assert {one.partition(":")[0] for one in found} >= {"same"}
    assert any(one.startswith("can't be checked here the adapter") for one in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3_text"])
def test_recurrent_layers_and_windows(tmp_path: Path, family: str):
    path = hybrids.build(family, tmp_path / "hybrid")
    with signing(path, tmp_path) as server:
        receipts = list(texts(server, 8, [path.name]))
    assert verified_here(server, receipts, tmp_path) == ["same"] * 8


def test_images(tmp_path: Path):
    path = make_vision_checkpoint("smolvlm", tmp_path / "seeing")
    files = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, file in enumerate(files):
        picture(seed).save(file)
    with signing(path, tmp_path) as server:
        receipts = list(pictures(server, 4, files))
    assert verified_here(server, receipts, tmp_path, images=files) == ["same"] * 4
    assert all("aren't here" in one for one in verified_here(server, receipts, tmp_path))


def test_receipts_of_batches(checkpoint: Path, tmp_path: Path):
    body = {"prompt": "The ferry leaves", "max_tokens": 5, "stemma": {"receipt": True}}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    with signing(checkpoint, tmp_path, batch_directory=tmp_path / "batches") as server:
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", line)}
        file_id = server.client.post("/v1/files", files=form).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = server.client.post("/v1/batches", json=asked).json()
        deadline = time.monotonic() + 60
        while batch["status"] not in ("completed", "failed"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            batch = server.client.get(f"/v1/batches/{batch['id']}").json()
        content = server.client.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert verified_here(server, [json.loads(one) for one in content.splitlines()], tmp_path) == ["same"]


def test_an_answer_that_is_known_takes_one_pass(harness):
    """And one that is known wrongly comes out right all the same."""
    known, prompt = KnownAnswers(), np.arange(20, dtype=np.int32)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    answer = harness().serve(prompt, params).token_ids[0]
    known.know(DEFAULT_NAMESPACE.salt, len(prompt), [answer])
    checking = harness(drafter=known, max_batch_tokens=128)
    assert checking.serve(prompt, params).token_ids[0] == answer
    assert len(checking.runner.plans) == 2
    known.know(DEFAULT_NAMESPACE.salt, len(prompt), [[*answer[:30], answer[30] ^ 1, *answer[31:]]])
    assert harness(drafter=known, max_batch_tokens=128).serve(prompt, params).token_ids[0] == answer
