"""Time llama.cpp in its own environment: `python llama_speed.py FILE THREADS CONTEXT STEPS PROMPT`.

Prints one line of JSON: milliseconds of a decode step at batch 1 over CONTEXT tokens (median of STEPS), and
of a prompt of PROMPT fresh tokens up to its logits (median of three). Calls go straight to the library, since
the Python class copies logits. With and without flash attention; the faster counts.
"""

from __future__ import annotations

import ctypes
import json
import random
import statistics
import sys
import time

import llama_cpp as lib

VOCAB = 30_000


class Session:
    """A model and an empty context."""

    def __init__(self, file: str, threads: int, size: int, flash: bool) -> None:
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(file.encode(), options)
        assert self._model, f"llama.cpp can't load {file}"
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        self._context = lib.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp makes no context"

    def run(self, num_tokens: int) -> float:
        """Compute fresh tokens; return milliseconds."""
        tokens = (ctypes.c_int32 * num_tokens)(*(random.randrange(3, VOCAB) for _ in range(num_tokens)))
        start = time.perf_counter()
        for first in range(0, num_tokens, 512):
            count = min(512, num_tokens - first)
            part = ctypes.cast(ctypes.byref(tokens, 4 * first), ctypes.POINTER(ctypes.c_int32))
            assert lib.llama_decode(self._context, lib.llama_batch_get_one(part, count)) == 0
        lib.llama_synchronize(self._context)
        return 1e3 * (time.perf_counter() - start)

    def clear(self) -> None:
        """Drop all tokens."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)


def measure(
    file: str, threads: int, context: int, steps: int, prompt: int, flash: bool
) -> tuple[float, float]:
    session = Session(file, threads, max(context + steps, prompt) + 64, flash)
    session.run(16)
    prompts = []
    for _ in range(3):
        session.clear()
        prompts.append(session.run(prompt))
    session.clear()
    session.run(context)
    return statistics.median(session.run(1) for _ in range(steps)), statistics.median(prompts)


def main() -> None:
    file, threads, context, steps, prompt = sys.argv[1], *map(int, sys.argv[2:6])
    random.seed(0)
    quiet = lib.llama_log_callback(lambda _level, _text, _data: None)
    lib.llama_log_set(quiet, None)
    found = [measure(file, threads, context, steps, prompt, flash) for flash in (False, True)]
    print(json.dumps({"step_ms": min(f[0] for f in found), "prompt_ms": min(f[1] for f in found)}))


if __name__ == "__main__":
    main()
