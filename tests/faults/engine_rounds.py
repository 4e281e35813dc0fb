"""Engines that are killed in the middle of writing: ``engine_rounds MODEL CACHE ROUNDS``.

Each round is a process of its own, forked (that spares loading the libraries 50 times): it answers all
prompts from what the ones before it left, says what it found, and then serves and writes until it is killed.
Prints one JSON line a round. The first round runs without any cache and isn't killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from itertools import count

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.types import Tier

PROMPTS = [f"Number {n}. " + "The quick brown fox jumps over the lazy dog. " * 4 for n in range(6)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FIXED = {"kv_cache_memory": "300kB", "block_size": 16, "num_threads": 1, "load_when": "always"}


def in_child(model: str, number: int, cache: str, report: int) -> None:
    # Enough that what a fast engine writes until it is killed leaves some of what the next one asks for.
    tiers = {"disk_cache": cache, "disk_cache_size": "12MB"} if number else {"enable_prefix_cache": False}
    llm = LLM(model, **FIXED, **tiers)
    texts = [answer.text for answer in llm.generate(PROMPTS, PARAMS)]
    stats = llm.engine.stats()
    found: dict[str, object] = {"texts": texts, "disk": stats.cached_tokens_by_tier.get(Tier.DISK, 0)}
    if stats.transfer is not None:
        found["faults"] = dict(stats.transfer.tiers[Tier.DISK].counters.reasons)
    os.write(report, json.dumps(found).encode() + b"\n")
    if not number:
        llm.close()
        os._exit(0)
    for turn in count():
        llm.generate([f"{number} {turn} {text}" for text in PROMPTS[:3]], PARAMS)


def main() -> None:
    model, cache, num_rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for number in range(num_rounds + 1):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            in_child(model, number, cache, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            line = pipe.readline()
        if number:
            time.sleep(random.Random(number).random() * 0.3)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
