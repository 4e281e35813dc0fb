"""The operator's plane and `stemma cache`, over a real engine with host and disk tiers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.errors import StorageError
from stemma.memory.tiers.bundle import write_bundle
from stemma.prefix.keys import DEFAULT_NAMESPACE
from tests.e2e.conftest import BLOCK_SIZE, Served, start_server

PREFIX = "Tell me all about caches, please. " * 6
NUM_BLOCKS = 7
"""Full blocks of the prefix."""


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


@pytest.fixture
def tiered(start: Callable[..., Served], tmp_path: Path) -> Served:
    return start(host_cache="4MB", disk_cache=tmp_path / "cache", disk_cache_size="20MB")


def lookup(served: Served, prompt: str = PREFIX, **body: object) -> dict:
    response = served.post("/admin/cache/lookup", prompt=prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()


def wait_for_disk(served: Served) -> None:
    assert asyncio.run(served.engine.cache_control.drain(20.0))


def test_lookup_tells_tiers_and_computes_nothing(tiered: Served) -> None:
    assert lookup(tiered)["num_cached_tokens"] == 0
    before = tiered.stats()["num_prompt_tokens"]
    num_prompt = tiered.complete(PREFIX, max_tokens=1)["usage"]["prompt_tokens"]
    wait_for_disk(tiered)
    found = lookup(tiered)
    whole = num_prompt // BLOCK_SIZE * BLOCK_SIZE
    assert found["num_prompt_tokens"] == num_prompt
    assert found["tokens_by_tier"] == {"device": num_prompt - 1, "host": 0, "disk": whole}
    assert found["served_by_tier"] == {"device": num_prompt - 1}
    assert lookup(tiered, cache_salt="other")["num_cached_tokens"] == 0
    assert tiered.stats()["num_prompt_tokens"] == before + num_prompt


def test_prewarm_computes_ahead_and_pins(tiered: Served) -> None:
    made = tiered.post("/admin/cache/prewarm", prompt=PREFIX, pin=True, priority=90, ttl_s=3600.0).json()
    assert made["num_cached_tokens"] == 0
    pin = made["pin"]
    assert pin["tokens_by_tier"]["device"] == NUM_BLOCKS * BLOCK_SIZE
    assert httpx.get(f"{tiered.url}/admin/cache/pins").json()["pins"] == [pin]
    flushed = tiered.post("/admin/cache/flush").json()
    assert flushed["kept_blocks"]["device"] == pin["tokens_by_tier"]["device"] // BLOCK_SIZE
    assert lookup(tiered)["served_by_tier"]["device"] == pin["tokens_by_tier"]["device"]
    assert tiered.post("/admin/cache/unpin", pin_id=pin["pin_id"]).json() == pin
    assert tiered.post("/admin/cache/unpin", pin_id=pin["pin_id"]).status_code == 400
    flushed = tiered.post("/admin/cache/flush").json()
    assert flushed["kept_blocks"] == {"device": 0, "host": 0, "disk": 0}
    assert flushed["freed_bytes"] > 0
    assert lookup(tiered)["num_cached_tokens"] == 0


def test_a_pin_ends_with_its_time(tiered: Served) -> None:
    tiered.post("/admin/cache/prewarm", prompt=PREFIX, pin=True, ttl_s=0.05)
    deadline = time.monotonic() + 20.0
    while httpx.get(f"{tiered.url}/admin/cache/pins").json()["pins"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tiered.post("/admin/cache/flush").json()["kept_blocks"]["device"] == 0


def test_pins_are_refused_for_nothing_and_for_too_much(start: Callable[..., Served]) -> None:
    served = start(kv_cache_memory="200kB")
    refused = served.post("/admin/cache/pin", prompt=PREFIX)
    assert refused.status_code == 400
    assert "prewarm" in refused.json()["error"]["message"]
    served.complete(PREFIX * 2, max_tokens=1)
    refused = served.post("/admin/cache/pin", prompt=PREFIX * 2)
    assert "50%" in refused.json()["error"]["message"]


def test_flush_leaves_no_trace_in_any_index(tiered: Served) -> None:
    tiered.complete(PREFIX, max_tokens=4)
    wait_for_disk(tiered)
    flushed = tiered.post("/admin/cache/flush").json()
    assert flushed["dropped_blocks"]["device"] > 0
    assert flushed["dropped_blocks"]["disk"] > 0
    assert flushed["num_dropped_blocks"] == sum(flushed["dropped_blocks"].values())
    assert lookup(tiered)["tokens_by_tier"] == {"device": 0, "host": 0, "disk": 0}
    assert tiered.complete(PREFIX, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_show_the_tiers(tiered: Served) -> None:
    tiered.complete(PREFIX, max_tokens=1)
    wait_for_disk(tiered)
    text = httpx.get(f"{tiered.url}/metrics").text
    assert 'stemma_tier_writes_total{result="stored",tier="disk"}' in text
    assert "stemma_compute_seconds_per_block" in text
    tiers = httpx.get(f"{tiered.url}/admin/cache/tiers").json()["tiers"]
    assert tiers["disk"]["num_blocks"] > 0
    assert tiered.stats()["transfer"]["tiers"]["disk"] == tiers["disk"]


def test_a_restarted_server_is_warm(start: Callable[..., Served], tmp_path: Path) -> None:
    flags = {"disk_cache": tmp_path / "cache", "disk_cache_size": "20MB"}
    first = start(**flags)
    cold = first.complete(PREFIX, max_tokens=8)
    first.engine.close()
    second = start(**flags)
    warm = second.complete(PREFIX, max_tokens=8)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= NUM_BLOCKS * BLOCK_SIZE
    assert second.stats()["cached_tokens_by_tier"]["disk"] >= NUM_BLOCKS * BLOCK_SIZE


def run_cli(*arguments: object) -> str:
    result = CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_an_imported_prefix_with_ids_beyond_the_vocabulary_is_refused(
    start: Callable[..., Served], tmp_path: Path
) -> None:
    """Its tree could not be drawn: the tokenizer has no text for such an id."""
    served = start(trust_imports=True)
    parts = served.engine.parts
    block = memoryview(bytes(parts.device.block_bytes))
    tokens = np.full(BLOCK_SIZE, 10_000_000, dtype=np.int32)
    forged = tmp_path / "forged.kv"
    with forged.open("wb") as file:
        roots = parts.key_space.roots(DEFAULT_NAMESPACE)
        write_bundle(file, parts.key_space, roots, tokens, iter([block]), block_bytes=len(block))
    with pytest.raises(StorageError, match="token id 10000000"):
        run_cli("cache", "import", forged, "--url", served.url)
    assert httpx.get(f"{served.url}/admin/cache/tree").status_code == 200


def test_export_from_one_server_and_import_to_another(
    start: Callable[..., Served], tmp_path: Path, tiny_model: Path
) -> None:
    one, two = start(), start(trust_imports=True)
    expected = one.complete(PREFIX, max_tokens=8)
    file = tmp_path / "prefix.kv"
    assert "blocks" in run_cli("cache", "export", file, "--url", one.url, "--prompt", PREFIX)
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert f"{NUM_BLOCKS} new blocks" in run_cli("cache", "import", file, "--url", two.url)
    assert "0 new blocks" in run_cli("cache", "import", file, "--url", two.url)
    found = two.complete(PREFIX, max_tokens=8)
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(StorageError, match="namespace"):
        run_cli("cache", "import", file, "--url", two.url, "--salt", "other")
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    two.post("/admin/cache/flush")
    with pytest.raises(StorageError, match="checksum"):
        run_cli("cache", "import", file, "--url", two.url)
    assert lookup(two)["served_by_tier"] == {"device": (NUM_BLOCKS - 1) * BLOCK_SIZE}


def test_servers_that_share_a_secret_take_each_others_files(
    start: Callable[..., Served], tmp_path: Path
) -> None:
    keys = [tmp_path / "key", tmp_path / "other key"]
    for number, key in enumerate(keys):
        key.write_text(f"{number}" * 40)
    one, two, stranger = (start(bundle_key_file=key) for key in (keys[0], keys[0], keys[1]))
    one.complete(PREFIX, max_tokens=1)
    file = tmp_path / "prefix.kv"
    run_cli("cache", "export", file, "--url", one.url, "--prompt", PREFIX)
    assert f"{NUM_BLOCKS} new blocks" in run_cli("cache", "import", file, "--url", two.url)
    for server in (stranger, start()):
        with pytest.raises(StorageError, match=r"another key|bundle-key-file"):
            run_cli("cache", "import", file, "--url", server.url)


def test_export_of_a_prompt_that_nobody_computed(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start()
    with pytest.raises(StorageError, match="prewarm"):
        run_cli("cache", "export", tmp_path / "x.kv", "--url", served.url, "--prompt", PREFIX)
    assert not list(tmp_path.iterdir())


def test_disk_caches_from_the_command_line(
    start: Callable[..., Served], tmp_path: Path, tiny_model: Path
) -> None:
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    served = start(disk_cache=cache, disk_cache_size="20MB")
    expected = served.complete(PREFIX, max_tokens=8)
    wait_for_disk(served)
    assert ", in use" in run_cli("cache", "ls", cache)
    assert "another server" in run_cli("cache", "clear", cache)
    assert "in use" in run_cli("cache", "gc", cache, "--max-size", "1kB")
    served.engine.close()
    assert "not in use" in run_cli("cache", "ls", cache)
    assert "blocks sound, none damaged" in run_cli("cache", "verify", cache)
    file = tmp_path / "prefix.kv"
    run_cli("cache", "export", file, "--dir", cache, "--prompt", PREFIX, "--model", tiny_model)
    assert f"{NUM_BLOCKS} new blocks" in run_cli("cache", "import", file, "--dir", copy, "--trust-imports")
    second = start(disk_cache=copy, disk_cache_size="20MB")
    found = second.complete(PREFIX, max_tokens=8)
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert second.stats()["cached_tokens_by_tier"]["disk"] == NUM_BLOCKS * BLOCK_SIZE
    assert "0 blocks, 0 answers dropped" in run_cli("cache", "gc", cache, "--unused-for", "1h")
    assert "removed" in run_cli("cache", "gc", cache, "--max-size", "1kB")
    assert run_cli("cache", "ls", cache) == ""


def test_verify_reports_damage_by_its_exit_status(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start(disk_cache=tmp_path, disk_cache_size="20MB")
    served.complete(PREFIX, max_tokens=1)
    served.engine.close()
    slab = next(tmp_path.glob("*/slab-*"))
    content = bytearray(slab.read_bytes())
    content[1000] ^= 1
    slab.write_bytes(content)
    result = CliRunner().invoke(make_app(), ["cache", "verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "1 checksum" in result.output
    assert "none damaged" in run_cli("cache", "verify", tmp_path)
