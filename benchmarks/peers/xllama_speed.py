"""Time mainline llama.cpp, built into a wheel: `python xllama_speed.py FILE THREADS CONTEXT STEPS PROMPT`.

Prints the line of JSON that llama_speed.py prints; times are what the server in the package says.
`STEMMA_PEER_VOCAB`: ids are drawn below it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from typing import Any

import xllamacpp

VOCAB = int(os.environ.get("STEMMA_PEER_VOCAB", "30000"))


def serve(file: str, threads: int, size: int) -> Any:
    """Return a server without a cache between prompts."""
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_batch, params.n_ubatch = size, 512, 512
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = False
    return xllamacpp.Server(params)


def timings(server: Any, num_tokens: int, steps: int) -> dict[str, float]:
    """Complete a fresh prompt; return what the server measured."""
    body = {
        **{"prompt": [random.randrange(3, VOCAB) for _ in range(num_tokens)], "n_predict": steps},
        **{"cache_prompt": False, "ignore_eos": True, "temperature": 0.0, "return_tokens": True},
    }
    answer = server.handle_completions(body)
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    measured: dict[str, float] = answer["timings"]
    return measured


def main() -> None:
    file, threads, context, steps, prompt = sys.argv[1], *map(int, sys.argv[2:6])
    random.seed(0)
    server = serve(file, threads, max(context + steps, prompt) + 64)
    timings(server, 16, 2)
    step_ms = statistics.median(timings(server, context, steps)["predicted_per_token_ms"] for _ in range(3))
    prompt_ms = statistics.median(timings(server, prompt, 1)["prompt_ms"] for _ in range(3))
    print(json.dumps({"step_ms": step_ms, "prompt_ms": prompt_ms}))


if __name__ == "__main__":
    main()
