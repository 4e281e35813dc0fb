"""`stemma serve A B`: real processes behind one address; what they had cached outlives a swap."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stemma.cli.ready_line import READY
from stemma.model.files.tiny import write_tiny_model

TEXT = "the tree of texts shows how they share their ancestry, " * 4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        (root / name).mkdir()
        write_tiny_model(root / name)
    command = [sys.executable, "-m", "stemma", "serve", str(root / "one"), f"second={root / 'two'}"]
    command += ["--alias", "gpt-4o=one", "--port", "0", "--disk-cache", str(root / "kv")]
    command += ["--block-size", "16", "--load-when", "always"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(line for line in process.stdout if line.startswith(READY)).removeprefix(READY).split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": TEXT, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def states(url: str) -> dict[str, str]:
    return {card["id"]: card["state"] for card in httpx.get(f"{url}/v1/models").json()["data"]}


def modalities(url: str) -> dict[str, list[str] | None]:
    cards = httpx.get(f"{url}/v1/models").json()["data"]
    return {card["id"]: card.get("input_modalities") for card in cards}


def test_models_come_and_go_and_find_their_prefixes_again(url: str) -> None:
    assert states(url) == {"one": "unloaded", "second": "unloaded", "gpt-4o": "unloaded"}
    assert modalities(url) == {"one": None, "second": None, "gpt-4o": None}, "nobody was asked yet"
    first = ask(url, "one").json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    body = {"model": "second", "prompt": TEXT, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = list(answer.iter_lines())
    assert any(re.match(r": second is (queued|loading)", line) for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]
    assert states(url)["one"] == "unloaded"

    again = ask(url, "gpt-4o").json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["stemma"]["cached_tokens_by_tier"]["disk"] > 0
    assert states(url) == {"one": "loaded", "second": "unloaded", "gpt-4o": "loaded"}
    assert modalities(url) == {"one": ["text"], "second": ["text"], "gpt-4o": ["text"]}, "kept once told"


@pytest.mark.slow
def test_a_crash_harms_one_and_wrong_names_are_told(url: str) -> None:
    assert ask(url, "one").status_code == 200
    [pid] = [int(found) for found in _children_of_server()]
    os.kill(pid, signal.SIGKILL)
    while states(url)["one"] == "loaded":
        pass
    assert ask(url, "one").status_code == 200

    wrong = ask(url, "gpt-5")
    assert wrong.status_code == 404
    assert "these are: one, second" in wrong.json()["error"]["message"]
    assert "stemma_models_loaded" in httpx.get(f"{url}/metrics").text


def _children_of_server() -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "--lifeline" in words and "--served-name=one" in words:
                found.append(folder.name)
    return found
