"""Published prefixes over a real engine: what tenants share, over tiers and restarts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.server.door.keyfile import add_key
from tests.e2e.conftest import BLOCK_SIZE, Served, start_server
from tests.e2e.tenant import Tenant, random_prompt

HEAD_BLOCKS = 4


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[..., tuple[Served, Callable[[], None]]]]:
    stops: list[Callable[[], None]] = []

    def run(**flags: object) -> tuple[Served, Callable[[], None]]:
        served, stop = start_server(tiny_model, **flags)
        stops.append(stop)
        return served, stop

    yield run
    for stop in stops:
        stop()


def cli(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["cache", *arguments, "--admin-key", "root"])
    assert result.exit_code == 0, result.output
    return result.output


def text_of(tenant: Tenant, prompt: list[int]) -> tuple[str, dict]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = tenant.http.post("/v1/completions", json=body, headers={"x-stemma-explain": "1"}).json()
    return answer["choices"][0]["text"], answer["usage"]["stemma"]


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_tenants_share_what_is_published_and_nothing_else(start, tmp_path: Path, index: str) -> None:
    keys, kept, disk = tmp_path / "keys.toml", tmp_path / "public.json", tmp_path / "disk"
    ada_key, bob_key = add_key(keys, "ada"), add_key(keys, "bob")
    flags = {"api_keys_file": keys, "admin_key": "root", "index": index, "public_prefixes": kept}
    flags |= {"disk_cache": disk, "disk_cache_size": "32MB"}
    served, stop = start(**flags)
    ada, bob = Tenant(served.url, ada_key), Tenant(served.url, bob_key)
    rng = random.Random(11)
    head = random_prompt(rng, HEAD_BLOCKS * BLOCK_SIZE + 5)
    secret = head + random_prompt(rng, 3 * BLOCK_SIZE)
    before, _ = text_of(ada, secret)
    assert text_of(bob, secret)[1]["cached_tokens_by_tier"] == {}

    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(map(str, head)))
    made = cli("publish", "--url", served.url, "--token-ids", str(ids), "--name", "system prompt")
    publish_id = made.split(":")[0]
    assert f"{HEAD_BLOCKS * BLOCK_SIZE} of {len(head)} tokens are public" in made
    assert publish_id in cli("published", "--url", served.url)

    after, found = text_of(ada, secret)
    assert after == before
    assert found["public_tokens"] == sum(found["cached_tokens_by_tier"].values()) == HEAD_BLOCKS * BLOCK_SIZE
    assert found["explanation"]["public_tokens"] == HEAD_BLOCKS * BLOCK_SIZE
    other, found = text_of(bob, secret)
    assert other == before
    assert sum(found["cached_tokens_by_tier"].values()) == HEAD_BLOCKS * BLOCK_SIZE
    assert sum(text_of(ada, secret)[1]["cached_tokens_by_tier"].values()) == len(secret) - 1
    assert (
        sum(text_of(bob, head[: 2 * BLOCK_SIZE + 1])[1]["cached_tokens_by_tier"].values()) == 2 * BLOCK_SIZE
    )
    _check(served)

    stop()
    served, _ = start(**flags)
    ada, bob = Tenant(served.url, ada_key), Tenant(served.url, bob_key)
    after, found = text_of(ada, secret)
    assert after == before
    assert found["cached_tokens_by_tier"]["disk"] >= HEAD_BLOCKS * BLOCK_SIZE + 2 * BLOCK_SIZE
    fresh = head + random_prompt(rng, BLOCK_SIZE)
    assert text_of(bob, fresh)[1]["public_tokens"] == HEAD_BLOCKS * BLOCK_SIZE
    cli("unpublish", publish_id, "--url", served.url)
    assert "public_tokens" not in text_of(bob, head + random_prompt(rng, BLOCK_SIZE))[1]
    assert cli("published", "--url", served.url) == ""
    _check(served)


def _check(served: Served) -> None:
    import asyncio

    asyncio.run(served.engine.check())


def test_quotas_leave_public_blocks_alone(start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    add_key(keys, "ada")
    bob_key = add_key(keys, "bob")
    served, _ = start(api_keys_file=keys, admin_key="root")
    block_bytes = served.engine.parts.model.layout(BLOCK_SIZE).block_bytes
    keys.write_text(keys.read_text() + f"cache_bytes = {{ device = {2 * block_bytes + 1} }}\n")
    rng = random.Random(2)
    head = random_prompt(rng, HEAD_BLOCKS * BLOCK_SIZE)
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(map(str, head)))
    assert "a restart drops it" in cli("publish", "--url", served.url, "--token-ids", str(ids))
    bob = Tenant(served.url, bob_key)
    for _ in range(3):
        _, found = text_of(bob, head + random_prompt(rng, 3 * BLOCK_SIZE))
        assert found["public_tokens"] == len(head)
    _check(served)
