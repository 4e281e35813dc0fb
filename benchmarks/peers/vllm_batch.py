"""Offline batch of vLLM: ``python vllm_batch.py MODEL PROMPTS.json KV_TOKENS``, where vLLM is installed.

Prints JSON: cached prompt tokens and seconds of one `LLM.generate` over all prompts, one token each.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    from vllm import LLM, SamplingParams

    model, file, kv_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(file) as source:
        prompts = json.load(source)
    block_size = 32  # its attention on tiles takes no smaller ones
    llm = LLM(
        model,
        enable_prefix_caching=True,
        block_size=block_size,
        num_gpu_blocks_override=kv_tokens // block_size,
        max_model_len=4096,
        disable_log_stats=True,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    cached = sum(one.num_cached_tokens or 0 for one in outputs)
    print(json.dumps({"cached": cached, "seconds": seconds}))


if __name__ == "__main__":
    main()
