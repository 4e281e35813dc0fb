"""Time ik_llama.cpp in its own environment: `python ik_llama_speed.py FILE THREADS CONTEXT STEPS PROMPT`.

Prints the line of JSON that llama_speed.py prints. Weights as the file has them and repacked as they load,
each with and without flash attention; the fastest counts. A number more: of how many prompts (3) the median
is taken.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time

from ik_llama_cpp import _ctypes_api as lib

VOCAB = int(os.environ.get("STEMMA_PEER_VOCAB", "30000"))


class Session:
    """A model and an empty context."""

    def __init__(self, file: str, threads: int, size: int, *, repacked: bool, flash: bool) -> None:
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        options.repack_tensors, options.use_mmap = repacked, not repacked
        self._model = lib.llama_model_load_from_file(file.encode(), options)
        assert self._model, f"ik_llama.cpp can't load {file}"
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = flash
        self._context = lib.llama_init_from_model(self._model, params)
        assert self._context, "ik_llama.cpp makes no context"
        self._batch = lib.llama_batch_init(512, 0, 1)
        self._num_tokens = 0

    def run(self, num_tokens: int) -> float:
        """Compute fresh tokens; return milliseconds."""
        ids = [random.randrange(3, VOCAB) for _ in range(num_tokens)]
        start = time.perf_counter()
        for first in range(0, num_tokens, 512):
            self._fill(ids[first : first + 512])
            assert lib.llama_decode(self._context, self._batch) == 0
        return 1e3 * (time.perf_counter() - start)

    def _fill(self, ids: list[int]) -> None:
        """Make these the batch's tokens; logits are those of the last one."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, self._num_tokens + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, i == len(ids) - 1
        self._num_tokens += len(ids)

    def clear(self) -> None:
        """Drop all tokens."""
        lib.llama_kv_cache_clear(self._context)
        self._num_tokens = 0

    def close(self) -> None:
        """Give all memory back."""
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        lib.llama_free_model(self._model)


def measure(session: Session, context: int, steps: int, prompt: int, turns: int) -> tuple[float, float]:
    session.run(16)
    prompts = []
    for _ in range(turns):
        session.clear()
        prompts.append(session.run(prompt))
    session.clear()
    session.run(context)
    return statistics.median(session.run(1) for _ in range(steps)), statistics.median(prompts)


def main() -> None:
    file, threads, context, steps, prompt = sys.argv[1], *map(int, sys.argv[2:6])
    turns = int(sys.argv[6]) if len(sys.argv) > 6 else 3
    random.seed(0)
    lib.llama_backend_init()
    found = []
    for repacked, flash in itertools.product((False, True), repeat=2):
        session = Session(file, threads, max(context + steps, prompt) + 64, repacked=repacked, flash=flash)
        found.append(measure(session, context, steps, prompt, turns))
        session.close()
    print(json.dumps({"step_ms": min(f[0] for f in found), "prompt_ms": min(f[1] for f in found)}))


if __name__ == "__main__":
    main()
