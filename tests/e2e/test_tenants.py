"""Tenants over a real engine: what time tells, and quotas of bytes."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.server.door.keyfile import add_key
from tests.e2e.conftest import BLOCK_SIZE, Served, start_server
from tests.e2e.tenant import NUM_PROMPT_TOKENS, Tenant, random_prompt


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[..., Served]]:
    """Return a starter of servers; all are stopped at the end."""
    stops: list[Callable[[], None]] = []

    def run(**flags: object) -> Served:
        served, stop = start_server(tiny_model, **flags)
        stops.append(stop)
        return served

    yield run
    for stop in stops:
        stop()


@pytest.mark.slow
@pytest.mark.parametrize("num_public", [0, 4 * BLOCK_SIZE])
def test_time_does_not_tell_what_another_tenant_has_cached(
    start: Callable[..., Served], tmp_path: Path, num_public: int
) -> None:
    """A prompt that another tenant has cached takes as long as a new one: a paired sign test over 60 rounds.

    If the two don't differ, more than 43 or fewer than 17 of 60 go one way with probability 0.0004. Their
    medians differ by half of what a hit saves at most, and the tenant's own prompt is faster. With
    a published head in front, which both tenants hit, the same holds for what follows it.
    """
    path = tmp_path / "keys.toml"
    ada_key, bob_key = add_key(path, "ada"), add_key(path, "bob")
    served = start(api_keys_file=path, admin_key="root", kv_cache_memory="64MB")
    ada, bob = Tenant(served.url, ada_key), Tenant(served.url, bob_key)
    rng = random.Random(7)
    head = random_prompt(rng, num_public)
    if head:
        body, headers = {"prompt": head}, {"authorization": "Bearer root"}
        made = httpx.post(f"{served.url}/admin/cache/publish", json=body, headers=headers, timeout=60)
        assert made.json()["num_public_tokens"] == num_public
    for _ in range(5):
        ada.ask(head + random_prompt(rng))
        bob.ask(head + random_prompt(rng))
    others: list[Any] = []
    colds: list[Any] = []
    own: list[Any] = []
    for _ in range(60):
        shared, fresh = head + random_prompt(rng), head + random_prompt(rng)
        ada.ask(shared)
        for prompt in rng.sample([shared, fresh], 2):
            took_s, num_cached = bob.ask(prompt)
            assert num_cached < num_public + 4  # own prompts may begin with the same token or two
            (others if prompt is shared else colds).append(took_s)
        took_s, num_cached = ada.ask(shared)
        assert num_cached == num_public + NUM_PROMPT_TOKENS - 1
        own.append(took_s)
    num_faster = int(np.sum(np.array(others) < np.array(colds)))
    cold_s, other_s, own_s = map(statistics.median, (colds, others, own))
    figures = f"{num_faster} of 60; cold {cold_s:.5f} other {other_s:.5f} own {own_s:.5f}"
    print(figures)
    assert 17 <= num_faster <= 43, figures
    assert own_s < 0.8 * cold_s, figures
    assert abs(other_s - cold_s) <= 0.5 * (cold_s - own_s), figures


def test_a_tenant_over_its_bytes_loses_its_own_blocks(start: Callable[..., Served], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    ada_key, bob_key = add_key(path, "ada"), add_key(path, "bob")
    served = start(api_keys_file=path, kv_cache_memory="8MB")
    layout = served.engine.parts.model.layout(BLOCK_SIZE)
    path.write_text(path.read_text() + f"cache_bytes = {{ device = {5 * layout.block_bytes + 1} }}\n")
    time.sleep(1.1)  # the file is looked at once a second
    ada, bob = Tenant(served.url, ada_key), Tenant(served.url, bob_key)
    rng = random.Random(3)
    mine = random_prompt(rng, 10 * BLOCK_SIZE)
    ada.ask(mine)
    prompts = [random_prompt(rng, 4 * BLOCK_SIZE) for _ in range(8)]
    for prompt in prompts:
        bob.ask(prompt)
    assert ada.ask(mine)[1] == len(mine) - 1
    assert bob.ask(prompts[-1])[1] > 0
    assert bob.ask(prompts[0])[1] == 0


def test_quotas_hold_in_the_tiers_below(start: Callable[..., Served], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "ada")
    bob_key = add_key(path, "bob")
    quotas = "cache_bytes = { host = %d, disk = %d, pool = %d }\n"
    flags = {
        "host_cache": "2MB",
        "host_write": "write_through",
        "disk_cache": tmp_path / "disk",
        "disk_cache_size": "64MB",
    }
    pool = tmp_path / "pool.json"
    pool.write_text(f'{{"path": "{tmp_path / "pool"}"}}')
    flags |= {"pool": "directory", "pool_config": pool}
    probe = start(api_keys_file=path)
    block_bytes = probe.engine.parts.model.layout(BLOCK_SIZE).block_bytes
    path.write_text(path.read_text() + quotas % (3 * block_bytes, 5 * block_bytes, 7 * block_bytes))
    served = start(api_keys_file=path, admin_key="root", kv_cache_memory="8MB", **flags)
    bob, rng = Tenant(served.url, bob_key), random.Random(4)
    for _ in range(4):
        bob.ask(random_prompt(rng, 4 * BLOCK_SIZE + 1))
    assert asyncio.run(served.engine.cache_control.drain(10.0))
    headers = {"authorization": "Bearer root"}
    tiers = httpx.get(f"{served.url}/admin/cache/tiers", headers=headers).json()["tiers"]
    assert (tiers["host"]["num_blocks"], tiers["disk"]["num_blocks"]) == (3, 5)
    assert len([file for file in (tmp_path / "pool").rglob("*") if file.is_file()]) - 7 in (0, 1)


def test_an_operator_carries_a_tenants_prefix_in_a_file(start: Callable[..., Served], tmp_path: Path) -> None:
    """`stemma cache export` and `import` find the namespace of the tenant that they name, and no other."""
    path, bundle = tmp_path / "keys.toml", str(tmp_path / "prefix.kv")
    ada_key, bob_key = add_key(path, "ada"), add_key(path, "bob")
    first, second = (start(api_keys_file=path, admin_key="root", trust_imports=True) for _ in range(2))
    prompt = random_prompt(random.Random(5), 4 * BLOCK_SIZE)
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(map(str, prompt)))
    Tenant(first.url, ada_key).ask(prompt)

    def run(*arguments: str) -> int:
        command = ["cache", *arguments, "--admin-key", "root"]
        return CliRunner().invoke(make_app(), command).exit_code

    export = ("export", bundle, "--url", first.url, "--token-ids", str(ids))
    assert run(*export) != 0
    assert run(*export, "--tenant", "bob") != 0
    assert run(*export, "--tenant", "ada") == 0
    assert run("import", bundle, "--url", second.url, "--tenant", "bob") != 0
    assert run("import", bundle, "--url", second.url, "--tenant", "ada") == 0
    assert Tenant(second.url, bob_key).ask(prompt)[1] == 0
    assert Tenant(second.url, ada_key).ask(prompt)[1] > 0


def test_a_file_carries_a_prompt_behind_a_published_prefix(
    start: Callable[..., Served], tmp_path: Path
) -> None:
    """Public blocks become public again, the rest its tenant's; a server that published less refuses."""
    path, bundle, listed = tmp_path / "keys.toml", str(tmp_path / "prefix.kv"), tmp_path / "public.json"
    ada_key, bob_key = add_key(path, "ada"), add_key(path, "bob")
    flags = {"api_keys_file": path, "admin_key": "root", "trust_imports": True}
    disk = tmp_path / "disk"
    first = start(**flags, public_prefixes=listed, disk_cache=disk, disk_cache_size="20MB")
    second = start(**flags)
    rng = random.Random(6)
    public, rest = random_prompt(rng, 2 * BLOCK_SIZE), random_prompt(rng, 2 * BLOCK_SIZE)
    ids, public_ids = tmp_path / "ids.txt", tmp_path / "public.txt"
    ids.write_text(" ".join(map(str, public + rest)))
    public_ids.write_text(" ".join(map(str, public)))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(make_app(), ["cache", *arguments])
        return result.output + str(result.exception or "")

    root = ("--admin-key", "root")
    publish = ("publish", "--token-ids", str(public_ids), *root)
    assert "are public" in run(*publish, "--url", first.url)
    _, cached = Tenant(first.url, ada_key).ask(public + rest)
    assert cached in (0, 2 * BLOCK_SIZE)
    export = ("export", bundle, "--token-ids", str(ids))
    assert "4 blocks" in run(*export, "--url", first.url, "--tenant", "ada", *root)

    to_second = ("import", bundle, "--url", second.url, "--tenant", "ada", *root)
    assert "2 leading blocks of the file's prompt were published" in run(*to_second)
    run(*publish, "--url", second.url)
    httpx.post(f"{second.url}/admin/cache/flush", headers={"authorization": "Bearer root"})
    assert "4 new blocks" in run(*to_second)
    assert Tenant(second.url, bob_key).ask(public + rest)[1] == 2 * BLOCK_SIZE
    assert Tenant(second.url, ada_key).ask(public + rest)[1] == 4 * BLOCK_SIZE - 1

    # Two prompts of a server without keys, in a directory: the list says where the second chain begins.
    keyless = start(public_prefixes=listed, disk_cache=tmp_path / "other", disk_cache_size="20MB")
    keyless.complete(public + rest, max_tokens=1)
    assert asyncio.run(keyless.engine.cache_control.drain(10.0))
    keyless.engine.close()
    from_disk = (*export, "--dir", str(tmp_path / "other"))
    assert "nothing of this prompt" in run(*from_disk)
    assert "4 blocks" in run(*from_disk, "--public-prefixes", str(listed))
    copy = tmp_path / "copy"
    assert "4 new blocks" in run("import", bundle, "--dir", str(copy), "--trust-imports")
    again = start(public_prefixes=listed, disk_cache=copy, disk_cache_size="20MB")
    usage = again.complete(public + rest, max_tokens=1)["usage"]
    assert usage["prompt_cache_hit_tokens"] == 3 * BLOCK_SIZE, "the last token is computed"
