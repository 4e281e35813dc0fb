"""What a step with latent attention costs: `python -m benchmarks.latent [--threads N]`.

Random weights of a small DeepSeek-V3 (hidden 512, 8 layers, 8 heads over latents of 256, 16 experts of which
2 are routed to and one is shared) in bf16. Each step runs in one native call, and through transformers'
modules with our products and attention, which is what other families get; the two take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DeepseekV3Config

from benchmarks.attention import BLOCK_SIZE, Case, make_batch
from stemma.config.settings import ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.load import loading
from stemma.model.opened.causal_lm import CausalLM

CASES = (
    Case("decode, batch 1, context 1024", [1024], [1]),
    Case("decode, batch 8, context 1024", [1024] * 8, [1] * 8),
    Case("512 new tokens over 512", [1024], [512]),
    Case("cold prompt of 1024", [1024], [1024]),
)


@dataclass(frozen=True)
class Way:
    """How a model runs."""

    name: str
    model: CausalLM


def save_model(folder: Path) -> Path:
    """Write the checkpoint."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=256,
        q_lora_rank=384,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        max_position_embeddings=8192,
        num_mtp_layers=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def load_ways(path: Path, threads: int) -> list[Way]:
    """Load the model as it is served, and as it would be without a fast path."""
    settings = ModelSettings(path=path, dtype="bfloat16", device="cpu", num_threads=threads)
    native = Way("one call", loading.load_model(settings))
    with patch.object(loading, "fitting_layout", lambda _checkpoint: None):
        return [native, Way("modules", loading.load_model(settings))]


def measure(case: Case, ways: list[Way], rounds: int) -> list[float]:
    """Return the least milliseconds of a step for each way, in turn."""
    batch, num_blocks = make_batch(case)
    stores = []
    for way in ways:
        kv = DeviceKV(way.model.layout(BLOCK_SIZE), num_blocks)
        kv.data.normal_()
        stores.append(kv)
        way.model.forward(batch, kv)
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for number, (way, kv) in enumerate(zip(ways, stores, strict=True)):
            start = perf_counter()
            way.model.forward(batch, kv)
            best[number] = min(best[number], perf_counter() - start)
    return [seconds * 1e3 for seconds in best]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = load_ways(save_model(Path(folder)), options.threads)
        table = Table("step", *(f"{way.name}, ms" for way in ways), "ratio")
        for case in CASES:
            rounds = options.rounds if max(case.num_queries) == 1 else max(3, options.rounds // 8)
            times = measure(case, ways, rounds)
            table.add_row(case.name, *(f"{ms:.2f}" for ms in times), f"{times[0] / times[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
