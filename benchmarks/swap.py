"""Time to the first token after a swap of models: `python -m benchmarks.swap [--rounds N]`.

Two names of the demo's model, one loaded at a time, asked in turn with the same prompt of 2,000 tokens:
every request starts a process. Once with tiers that survive the swap (`--disk-cache`), once without, as a
proxy that only starts processes has it: the prompt is computed anew. The two take turns; medians.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from stemma.cli.ready_line import READY

_PROMPT = " ".join(f"{number} trees" for number in range(500))
_NAMES = ("first", "second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = {
            "kept": stack.enter_context(_serving("--disk-cache", folder)),
            "process": stack.enter_context(_serving()),
        }
        found: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(asked.rounds + 1):
            for name, url in urls.items():
                for model in _NAMES:
                    took = _first_token_s(url, model)
                    if number:  # the first round computes what the others find
                        found[name].append(took)
    kept, process = (statistics.median(found[name]) for name in ("kept", "process"))
    print(
        f"first token after a swap, s: {kept:.2f} with prefixes kept, {process:.2f} by a process alone, ",
        end="",
    )
    print(f"ratio {kept / process:.2f}")
    for name, seconds in found.items():
        print(name, *(f"{one:.2f}" for one in seconds))


@contextmanager
def _serving(*flags: str) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "stemma",
        "serve",
        *(f"{name}=demo" for name in _NAMES),
        "--port=0",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(line for line in process.stdout if line.startswith(READY)).removeprefix(READY).split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _first_token_s(url: str, model: str) -> float:
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 8, "stream": True}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                return time.perf_counter() - began
    raise RuntimeError("the answer has no token")


if __name__ == "__main__":
    main()
