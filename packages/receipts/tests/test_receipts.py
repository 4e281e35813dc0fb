"""Answers with receipts are found the same by another process; what was changed is found."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from packages.receipts.tests.signing import Receipt, SigningServer, lied, signing, statement_of, verified

from stemma_receipts.identity import weights_digest

TEXT = "The library opens at nine, and the reading room has forty places by the window."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
HI = [{"role": "user", "content": "Hi, what is new?"}]


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    with signing(checkpoint, tmp_path_factory.mktemp("signing")) as found:
        yield found


def drawn_in_many_ways(server: SigningServer) -> list[Receipt]:
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 1, "n": 3, "seed": 5},
        {"temperature": 1, "seed": 3, "logit_bias": {"100": 5.0}, "min_tokens": 4},
        {"temperature": 1, "seed": 4, "stop": ["a", "e"], "max_tokens": 30},
        {"temperature": 1, "seed": 4, "ignore_eos": True, "bad_words": ["the"], "logprobs": 2},
        {"temperature": 0, "max_tokens": 100},
        {"temperature": 1, "guided_json": SCHEMA, "max_tokens": 40},
        {"temperature": 0, "guided_regex": "[a-f]{3,9}", "max_tokens": 40},
    ]
    return [server.complete(TEXT, **one) for one in asked]


def in_every_api(server: SigningServer) -> list[Receipt]:
    """As wholes and as streams."""
    chat = {"messages": HI, "max_tokens": 8}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}),
        ("/v1/chat/completions", chat | {"tools": [TOOL]}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 8}),
        ("/v1/messages", {"model": server.model.name, "messages": HI, "max_tokens": 8}),
        ("/v1/completions", {"prompt": [TEXT, TEXT[:20]], "max_tokens": 6}),
    ]
    found = []
    for path, body in bodies:
        found += receipts_in([server.post(path, **body).json()])
        lines = server.post(path, **body, stream=True).text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        found += receipts_in([json.loads(events[-2 if path == "/v1/messages" else -1])])
    return found


def receipts_in(value: Any) -> list[Receipt]:
    if isinstance(value, dict) and "envelope" in value:
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for part in inner for one in receipts_in(part)]


def tampered(receipt: Receipt) -> Receipt:
    """Return a receipt whose payload was changed behind the signature."""
    content = base64.b64decode(receipt["envelope"]["payload"]).replace(b'"n":1', b'"n":2')
    return {"envelope": receipt["envelope"] | {"payload": base64.b64encode(content).decode()}}


def test_answers_are_found_the_same_and_changes_are_found(server: SigningServer, tmp_path: Path):
    good = [*drawn_in_many_ways(server), *in_every_api(server)]
    assert len(good) == 11 + 2 * 7
    warm = server.complete(TEXT, temperature=1, seed=11, max_tokens=20)

    def swapped(predicate: dict[str, Any]) -> None:
        ids = predicate["opening"]["answers"][0]
        place = next(n for n in range(1, len(ids)) if ids[n] != ids[n - 1])
        ids[place - 1], ids[place] = ids[place], ids[place - 1]

    def token(predicate: dict[str, Any]) -> None:
        predicate["opening"]["answers"][0][9] ^= 1

    def prompt(predicate: dict[str, Any]) -> None:
        predicate["opening"]["prompt"][-1] ^= 1

    changes = {
        "differs at token 10": token,
        "differs at token": swapped,
        "differs at token ": prompt,
        "differs at token 3:": lambda p: p["opening"]["answers"][0].__setitem__(2, (1 << 31) - 1),
        "differs at token 1:": lambda p: p["sampling"].update(seed=12),
        "differs at token  ": lambda p: p["sampling"].update(temperature=0.2),
        "differs at token   ": lambda p: p["opening"]["answers"][0].pop(),
        "differs at its end": lambda p: p["answers"][0].update(finish_reason="stop"),
        "differs answer 2": lambda p: p["sampling"].update(n=2),
        "can't be checked here another weights": lambda p: p["model"].update(weights="0" * 64),
        "can't be checked here another tokenizer": lambda p: p["model"].update(tokenizer="0" * 64),
        "can't be checked here another template": lambda p: p["model"].update(template="0" * 64),
        "can't be checked here another numeric path": lambda p: p["model"].update(computation="neon-1"),
        "can't be checked here the adapter": lambda p: p.update(adapter="0" * 64),
    }
    lies = [lied(server, warm, change) for change in changes.values()]
    hashed = server.post("/v1/completions", prompt=TEXT, stemma={"receipt": "hashed"}, max_tokens=9).json()
    [opened] = receipts_in(hashed)
    assert "opening" not in statement_of(opened)["predicate"]
    assert TEXT not in json.dumps(statement_of(opened))
    others = [
        tampered(warm),
        opened,
        {"envelope": opened["envelope"]},
        opened | {"opening": statement_of(warm)["predicate"]["opening"]},
    ]
    found = verified(server, [*good, warm, *lies, *others], tmp_path)
    assert found[: len(good) + 1] == ["same"] * (len(good) + 1)
    lied_about = found[len(good) + 1 : -4]
    for expected, seen in zip(changes, lied_about, strict=True):
        assert seen.startswith(expected.strip()), (expected, seen)
    assert found[-4].startswith("differs not signed by the key")
    assert found[-3] == "same"
    assert "who holds the opening" in found[-2]
    assert "isn't of this receipt" in found[-1]


def test_what_was_cached_is_not_in_it(server: SigningServer):
    cold, warm = (server.complete(TEXT * 3, temperature=0, cache_salt="a") for _ in range(2))
    first, second = (statement_of(one)["predicate"] for one in (cold, warm))
    for one in (first, second):
        del one["id"], one["sampling"]["seed"], one["commitments"], one["opening"]["salt"]
    assert first == second


def test_a_sample_checks_some(server: SigningServer, tmp_path: Path):
    receipts = [server.complete(TEXT, max_tokens=3) for _ in range(10)]
    assert verified(server, receipts, tmp_path, "--sample", "20%") == ["same"] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/generate", {"inputs": "a"}),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, "temperature": 0}),
    ],
)
def test_what_has_no_receipt_says_so(server: SigningServer, path: str, body: dict[str, Any]):
    response = server.client.post(path, json={"stemma": {"receipt": True}, **body})
    assert response.status_code in (400, 422)


def test_a_server_without_a_key_says_so(checkpoint: Path, server: SigningServer, tmp_path: Path):
    assert server.client.get("/v1/receipts/key").json()["public_key"] == server.public().read_text()
    assert "receipts" not in json.dumps(server.client.post("/v1/completions", json={"prompt": "a"}).json())


def test_one_bit_of_any_weight_is_another_model(checkpoint: Path, tmp_path: Path):
    before = weights_digest(checkpoint)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_digest(copy) == before
    [weights] = copy.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights_digest(copy) != before
