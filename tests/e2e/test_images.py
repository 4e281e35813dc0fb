"""A server that is killed: the image's tokens come from disk, and the encoder has nothing to do."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.native.library import load_kernels
from tests.memory.tiers.pool.servers import free_port
from tests.vision_checkpoints import make_vision_checkpoint, picture, vision_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
START_TIMEOUT_S = 120


@contextmanager
def killed_afterwards(model: Path, disk: Path) -> Iterator[str]:
    """Run `stemma serve`; kill it as `kill -9` does."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    flags = f"--port {port} --kv-cache-memory 4MB --block-size 16 --load-when always --disk-cache {disk}"
    command = [
        sys.executable,
        "-m",
        "stemma",
        "serve",
        str(model),
        *flags.split(),
        "--disk-cache-size",
        "64MB",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready(url):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, question: str) -> tuple[str, dict[str, Any]]:
    """Return the answer to a question about an image, and what is told of the cache."""
    stream = io.BytesIO()
    picture(5, 200, 120).save(stream, "PNG")
    image = {"url": f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"}
    parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["usage"]["stemma"]


@pytest.mark.slow
@pytest.mark.parametrize("family", vision_params("qwen2.5-vl"))
def test_an_image_survives_kill_9(family: str, tmp_path: Path) -> None:
    model = make_vision_checkpoint(family, tmp_path / family)
    with killed_afterwards(model, tmp_path / "disk") as url:
        first, told = ask(url, "What colour is the sky?")
        assert told["miss_reason"] == "cold"
        second, told = ask(url, "How many people are there?")
        assert told["cached_tokens_by_tier"]["device"] > 25
        time.sleep(2)  # a disk write may still be queued
    with killed_afterwards(model, tmp_path / "disk") as url:
        again, told = ask(url, "How many people are there?")
        assert told["cached_tokens_by_tier"] == {"disk": told["cached_tokens_by_tier"]["disk"]}
        assert told["cached_tokens_by_tier"]["disk"] > 25
        assert again == second
        assert ask(url, "What colour is the sky?")[0] == first
        assert "stemma_images_encoded_total 0.0" in httpx.get(f"{url}/metrics").text
