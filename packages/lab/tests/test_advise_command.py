"""`stemma advise` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.errors import ConfigError
from stemma_lab.served_advice import from_server

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"


def run(*arguments: object):
    return CliRunner().invoke(make_app(), ["advise", *map(str, arguments)])


def test_a_trace() -> None:
    result = run(SAMPLE, "--bytes-per-token", "64KiB", "--gpu-memory", "10GB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found[0]["topic"] == "worth"
    assert found[0]["trace"]["name"] == SAMPLE.name
    assert {one["topic"] for one in found} <= {"worth", "memory", "tier", "policy", "prompts"}
    plain = run(SAMPLE, "--bytes-per-token", "64KiB", "--gpu-memory", "10GB")
    assert "of prompt tokens" in plain.output
    assert f"{SAMPLE.name} (sha256 {found[0]['trace']['sha256'][:8]}," in plain.output


def test_the_size_of_a_token_is_needed_once() -> None:
    for options in ((), ("--bytes-per-token", "1KiB", "--model", "x")):
        assert isinstance(run(SAMPLE, *options).exception, ConfigError)


def stats(**fields: object) -> dict[str, object]:
    given = {"num_prompt_tokens": 1000, "cached_tokens_by_tier": {"device": 400}, "num_evicted_blocks": 0}
    return {**given, **fields}


def report(num_requests: int = 500, *divergences: dict[str, object]) -> dict[str, object]:
    return {"num_requests": num_requests, "num_prompt_tokens": 1000, "divergences": list(divergences)}


@pytest.mark.parametrize(
    ("counters", "requests", "settings"),
    [
        (stats(), 500, [None, None]),
        (stats(), 5, [None]),
        (stats(cached_tokens_by_tier={}), 500, ["enable_prefix_cache = false", None]),
        (stats(cached_tokens_by_tier={}, num_evicted_blocks=9), 500, ["record_trace", None]),
        (stats(num_evicted_blocks=10, num_regretted_blocks=5), 500, [None, "host_cache, kv_cache_memory"]),
        (
            stats(num_evicted_blocks=10, num_regretted_blocks=5, transfer={"tiers": {"host": {}}}),
            500,
            [None, "kv_cache_memory"],
        ),
    ],
)
def test_a_server(counters, requests: int, settings: list[str | None]) -> None:
    assert [one.setting for one in from_server(counters, report(requests))] == settings


def test_prompts_of_a_server() -> None:
    costly = {"saved_tokens": 100, "advice": "Move the date to the end.", "saved_s": 1.5}
    found = from_server(stats(), report(500, costly, {"saved_tokens": None, "advice": "-"}))
    assert (found[-1].text, found[-1].hits_after, found[-1].prefill_s_saved) == (
        "Move the date to the end.",
        0.5,
        1.5,
    )
    assert len(found) == 3
