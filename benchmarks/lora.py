"""What adapters cost: decode and prefill of the demo's model without, with one and with several adapters.

``python -m benchmarks.lora [MODEL]``: random adapters of rank 16 for every layer that may have one. A row
names how many sequences decode together and how many adapters they use: milliseconds a step, the median of
three runs of 64 tokens whose prompts are cached. The prompt rows are one prompt of 512 tokens, not cached.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from stemma import LLM, SamplingParams

RANK, NUM_ADAPTERS, NUM_TOKENS, RUNS = 16, 8, 64, 3
CASES = ((1, 0), (1, 1), (8, 0), (8, 1), (8, 4), (8, 8))
PROMPT_TOKENS = 512


def write_adapter(llm: LLM, path: Path, seed: int) -> Path:
    """Write an adapter with small random matrices."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in llm.adapters.linears.items():
        for half, size in (("A", (RANK, shape.in_features)), ("B", (shape.out_features, RANK))):
            matrix = torch.randn(size, generator=generator) * 0.01
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = matrix.bfloat16()
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def step_ms(llm: LLM, num_seqs: int, num_adapters: int) -> float:
    """Return milliseconds a decode step."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [[10 + number, *range(20, 50)] for number in range(num_seqs)]
    names = [str(n % num_adapters) if num_adapters else None for n in range(num_seqs)]
    llm.generate(prompts, params, lora=names)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        llm.generate(prompts, params, lora=names)
        times.append((time.perf_counter() - start) / NUM_TOKENS * 1e3)
    return statistics.median(times)


def prompt_ms(llm: LLM, name: str | None) -> float:
    """Return milliseconds for a prompt that isn't cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    times = []
    for run in range(RUNS + 1):
        prompt = [1000 + run, *(3 + 7 * i % 900 for i in range(PROMPT_TOKENS - 1))]
        start = time.perf_counter()
        llm.generate(prompt, params, lora=name)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    llm = LLM(model, kv_cache_memory="500MB", speculation="off")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_ADAPTERS):
            llm.adapters.load(str(number), write_adapter(llm, Path(folder) / str(number), number))
    for num_seqs, num_adapters in CASES:
        took = step_ms(llm, num_seqs, num_adapters)
        print(f"decode, {num_seqs} sequences, {num_adapters} adapters: {took:6.2f} ms a step", flush=True)
    for name in (None, "0"):
        took = prompt_ms(llm, name)
        print(f"prompt of {PROMPT_TOKENS}, {'an' if name else 'no'} adapter: {took:7.1f} ms", flush=True)
    llm.close()


if __name__ == "__main__":
    main()
