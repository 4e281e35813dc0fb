"""Explanations over the real server: where prompts part, who reads which text, and `stemma explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.server.door.keyfile import add_key
from tests.adapters import write_adapter
from tests.e2e.conftest import Served, start_server

SYSTEM = "You are the assistant of the harbour library. Today is 2026-11-"
OLD, NEW = SYSTEM + "19. When does it open?", SYSTEM + "20. Who asks?"
SECRET = SYSTEM + "19. The code of the safe is 4711."


def ask(served: Served, prompt: str, path: str = "/v1/completions", **given: Any) -> httpx.Response:
    headers = given.pop("headers", {})
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **given}
    response = httpx.post(served.url + path, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response


def why(answer: httpx.Response) -> dict[str, Any]:
    return answer.json()["usage"]["stemma"]["explanation"]


@pytest.mark.parametrize("how", [{"stemma": {"explain": True}}, {"headers": {"x-stemma-explain": "1"}}])
def test_an_answer_explains_itself_when_asked(served: Served, how: dict[str, Any]) -> None:
    assert "explanation" not in ask(served, OLD).json()["usage"]["stemma"]
    found = why(ask(served, NEW, **how))
    tokens = served.engine.tokenizer.encode(NEW)
    assert found["reason"] in ("diverged", "flushed")  # an earlier test may have cached more
    assert found["prompt_tokens"] == len(tokens)
    assert found["cached_tokens"] + found["computed_tokens"] == len(tokens)
    assert found["cached_tokens_by_tier"] == {"device": found["cached_tokens"]}
    place = found["parts_at"]
    assert place["token"] == found["cached_tokens"] + 1
    assert place["yours"].startswith(place["common"])
    assert place["yours"] in NEW
    assert place["cached"] is None


def test_the_operator_reads_both_texts(served: Served) -> None:
    ask(served, OLD)
    made = ask(served, NEW).json()["id"]
    ask(served, "another one")
    found = httpx.get(f"{served.url}/admin/explain", params={"request": made}).json()
    place = found["parts_at"]
    assert place["cached"] in OLD
    behind = len(place["common"])
    assert (place["cached"][behind], place["yours"][behind]) == ("1", "2")
    assert httpx.get(f"{served.url}/admin/explain").json()["reason"] == "cold"
    unknown = httpx.get(f"{served.url}/admin/explain", params={"request": "cmpl-none"})
    assert unknown.status_code == 404


def test_streams_and_other_shapes_explain_too(served: Served) -> None:
    ask(served, OLD)
    streamed = ask(served, NEW, stream=True, stream_options={"include_usage": True}, stemma={"explain": True})
    assert '"explanation":{' in streamed.text
    header = {"x-stemma-explain": "true"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path in ("/v1/messages", "/v1/chat/completions"):
        found = httpx.post(served.url + path, json=body, headers=header, timeout=60).json()
        assert found["usage"]["stemma"]["explanation"]["prompt_tokens"] > 0
    shape = {"inputs": "hi", "parameters": {"max_new_tokens": 1, "details": True}}
    found = httpx.post(f"{served.url}/generate", json=shape, headers=header, timeout=60).json()
    assert "explanation" in found["details"]["stemma"]


@pytest.mark.parametrize(
    "how", [{"stemma": 1}, {"stemma": {"explain": "yes"}}, {"headers": {"x-stemma-explain": "maybe"}}]
)
def test_a_malformed_wish_is_refused(served: Served, how: dict[str, Any]) -> None:
    headers = how.pop("headers", {})
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, **how}
    response = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    assert "explain" in response.text or "stemma" in response.text


def test_the_command_renders_the_last_request(served: Served) -> None:
    ask(served, OLD)
    made = ask(served, NEW).json()["id"]
    for which in (["--last"], [made]):
        result = CliRunner(env={"COLUMNS": "160"}).invoke(
            make_app(), ["explain", *which, "--url", served.url]
        )
        assert result.exit_code == 0, result.output
        assert "diverged" in result.output or "flushed" in result.output
        assert "from device" in result.output
        assert "cached" in result.output
        assert "yours" in result.output


def test_texts_come_only_from_the_tenants_own_prompts(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    ada, bob = add_key(path, "ada"), add_key(path, "bob")
    served, stop = start_server(tiny_model, api_keys_file=path, admin_key="root")
    try:
        asked = {"x-stemma-explain": "1"}
        ask(served, SECRET, headers={"authorization": f"Bearer {ada}"})
        foreign = ask(served, NEW, headers={"authorization": f"Bearer {bob}", **asked})
        assert why(foreign)["reason"] == "cold"
        assert why(foreign)["parts_at"]["cached"] is None
        own = ask(served, NEW, headers={"authorization": f"Bearer {ada}", **asked})
        assert why(own)["parts_at"]["cached"] in SECRET
        assert "19" in why(own)["parts_at"]["cached"]
        id_only = {"request": foreign.json()["id"]}
        for key, status in ((bob, 401), ("root", 200)):
            headers = {"authorization": f"Bearer {key}"}
            seen = httpx.get(f"{served.url}/admin/explain", params=id_only, headers=headers)
            assert seen.status_code == status
            assert "4711" not in seen.text
    finally:
        stop()


def test_rounded_reports_name_no_place(tiny_model: Path) -> None:
    served, stop = start_server(tiny_model, report_granularity="block")
    try:
        ask(served, OLD)
        found = why(ask(served, NEW, stemma={"explain": True}))
        assert found["cached_tokens"] % 16 == 0
        assert found["parts_at"] is None
    finally:
        stop()


def test_a_prompt_cached_for_an_adapter_says_so_over_http(tiny_model: Path, tmp_path: Path) -> None:
    """An adapter in PEFT's format is loaded over HTTP and asked; then the model without it."""
    layer = "model.layers.0.self_attn.q_proj"
    weight = AutoModelForCausalLM.from_pretrained(tiny_model).get_submodule(layer).weight
    assert isinstance(weight, torch.Tensor)
    made = torch.Generator().manual_seed(3)
    halves = (
        torch.randn(4, weight.shape[1], generator=made),
        torch.randn(weight.shape[0], 4, generator=made),
    )
    write_adapter(tmp_path / "poet", {layer: halves})
    served, stop = start_server(tiny_model, lora_directories=[tmp_path])
    try:
        loaded = served.post("/v1/load_lora_adapter", lora_name="poet", lora_path=str(tmp_path / "poet"))
        assert loaded.status_code == 200, loaded.text
        asked: dict[str, Any] = {"headers": {"x-stemma-explain": "1"}}
        assert why(ask(served, SECRET, model="poet", **asked))["reason"] == "cold"
        found = why(ask(served, SECRET, **asked))
        assert (found["reason"], found["cached_tokens"]) == ("other_adapter", 0)
        assert "an adapter changes the KV of every token" in found["detail"]
        back = why(ask(served, SECRET, model="poet", **asked))
        assert back["cached_tokens"] == back["prompt_tokens"] - 1
        assert why(ask(served, "Nobody has sent this prompt before, to anyone.", **asked))["reason"] == "cold"
    finally:
        stop()
