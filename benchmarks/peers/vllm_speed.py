"""Time vLLM over a checkpoint: `python vllm_speed.py DIRECTORY THREADS CONTEXT STEPS PROMPT [PROMPT ...]`.

Prints one line of JSON: `step_ms` of one sequence at CONTEXT, and `prompt_ms` for each PROMPT. Nothing is
cached between prompts. Ids are drawn below `STEMMA_PEER_VOCAB`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from typing import Any

VOCAB = int(os.environ.get("STEMMA_PEER_VOCAB", "30000"))


def generate_s(llm: Any, num_tokens: int, steps: int) -> float:
    """Complete a fresh prompt; return its seconds."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [random.randrange(3, VOCAB) for _ in range(num_tokens)]}
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    path, threads, context, steps, *prompts = sys.argv[1], *map(int, sys.argv[2:])
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2"}
    from vllm import LLM

    random.seed(0)
    longest = max(context + steps, *prompts) + 64
    llm = LLM(
        model=path,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    generate_s(llm, 16, 2)
    prompt_ms = {n: 1e3 * statistics.median(generate_s(llm, n, 1) for _ in range(3)) for n in prompts}
    first_s = statistics.median(generate_s(llm, context, 1) for _ in range(3))
    all_s = statistics.median(generate_s(llm, context, 1 + steps) for _ in range(3))
    print(json.dumps({"step_ms": 1e3 * (all_s - first_s) / steps, "prompt_ms": prompt_ms}))


if __name__ == "__main__":
    main()
