"""Receipts: 1,000 answers of all kinds, signed by servers, verified in another process; the cost to sign.

    python -m benchmarks.receipts [--count 1000] [--folder DIR]

Tiny checkpoints, as the tests build them: a plain model with adapters, grammars and drafts, a hybrid of
recurrent layers and a vision model. Prints how many receipts of each were found the same, and how long the
observer took to sign beside the time of the whole answers.
"""

from __future__ import annotations

import argparse
import base64
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packages.receipts.tests.signing import Receipt, SigningServer, signing, verified
from tests import checkpoints, hybrids
from tests.adapters import build_adapter
from tests.vision_checkpoints import make_vision_checkpoint, picture

from stemma.engine.api import GenerationRequest
from stemma.engine.sampling.params import SamplingParams
from stemma.server.observe.collected import CollectedSequence
from stemma.types import FinishReason, as_tokens
from stemma_receipts.envelope import signed
from stemma_receipts.identity import Identity
from stemma_receipts.keys import key_id, read_private_key
from stemma_receipts.statement import opening_of, statement_of

WORDS = ("harbour", "lantern", "seven", "maps", "of", "the", "old", "river", "a", "ferry", "leaves", "noon")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def text(chance: random.Random) -> str:
    """Words that repeat, so that drafts hold and prefixes are shared."""
    head = " ".join(WORDS) if chance.random() < 0.5 else ""
    return f"{head} {' '.join(chance.choices(WORDS, k=chance.randint(3, 30)))}"


def drawing(chance: random.Random) -> dict[str, Any]:
    """One way to draw."""
    found: dict[str, Any] = {
        "temperature": chance.choice((0, 0, 1, 0.7)),
        "max_tokens": chance.randint(4, 48),
    }
    more: list[dict[str, Any]] = [
        {},
        {},
        {"top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.3},
        {"n": 3, "temperature": 1},
        {"stop": ["e"]},
        {"min_tokens": 3, "logit_bias": {"101": 3.0}},
        {"guided_json": SCHEMA},
        {"guided_regex": "[a-m ]{4,20}"},
        {"ignore_eos": True},
    ]
    return found | chance.choice(more)


def texts(server: SigningServer, count: int, models: list[str]) -> Iterator[Receipt]:
    """Receipts of completions, by one of `models` each."""
    chance = random.Random(count)
    for _ in range(count):
        yield server.complete(text(chance), model=chance.choice(models), **drawing(chance))


def pictures(server: SigningServer, count: int, files: list[Path]) -> Iterator[Receipt]:
    """Receipts of chats with one or two of the pictures."""
    chance = random.Random(count)
    for _ in range(count):
        chosen = chance.sample(files, chance.randint(1, 2))
        parts: list[dict[str, Any]] = [{"type": "text", "text": text(chance)[:80]}]
        for file in chosen:
            url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        body = {"messages": [{"role": "user", "content": parts}], "temperature": chance.choice((0, 1))}
        answer = server.post("/v1/chat/completions", max_tokens=chance.randint(3, 16), **body).json()
        yield from answer["usage"]["stemma"]["receipts"]


def run(name: str, server: SigningServer, receipts: list[Receipt], folder: Path, *more: object) -> bool:
    """Verify and print; return whether all are the same."""
    start = time.perf_counter()
    found = Counter(one.partition(" at ")[0] for one in verified(server, receipts, folder, *more))
    seconds = time.perf_counter() - start
    print(f"{name:28} {len(receipts):5} receipts: {dict(found)}, {seconds:.0f} s with loading", flush=True)
    return set(found) == {"same"}


def signing_seconds(folder: Path, num_prompt: int, num_answer: int) -> float:
    """Return the median time to state and sign an answer."""
    key = read_private_key(folder / "key.pem")
    name = key_id(key.public_key())
    identity = Identity("m", "0" * 64, "0" * 64, "0" * 64, "avx2-6", {})
    request = GenerationRequest("id", as_tokens(range(num_prompt)), SamplingParams(seed=1))
    sequences = [CollectedSequence([], list(range(num_answer)), [], FinishReason.STOP)]
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        opening = opening_of(request, sequences)
        signed(statement_of(identity, request, sequences, opening, is_open=True), key, name)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="receipts-"))
    share = max(1, given.count // 10)
    whole = []
    plain = checkpoints.build("qwen2", folder / "plain")
    sides = {name: build_adapter(plain, folder / name, seed=n) for n, name in enumerate(("one", "two"), 1)}
    lora = ",".join(f"{name}={path}" for name, path in sides.items())
    with signing(plain, folder, lora=lora) as server:
        found = list(texts(server, 5 * share, [plain.name, plain.name, "one", "two"]))
    whole.append(run("plain, adapters, grammars", server, found, folder, "--lora", lora))
    hybrid = hybrids.build("qwen3_5_text", folder / "hybrid")
    with signing(hybrid, folder) as server:
        found = list(texts(server, 3 * share, [hybrid.name]))
    whole.append(run("hybrid", server, found, folder))
    seeing = make_vision_checkpoint("smolvlm", folder / "seeing")
    files = [folder / f"{seed}.png" for seed in range(6)]
    for seed, file in enumerate(files):
        picture(seed).save(file)
    with signing(seeing, folder) as server:
        found = list(pictures(server, 2 * share, files))
    images = [word for file in files for word in ("--image", file)]
    whole.append(run("images", server, found, folder, *images))
    for sizes in ((512, 128), (8192, 512)):
        print(f"signing {sizes[0]} + {sizes[1]} tokens: {1000 * signing_seconds(folder, *sizes):.2f} ms")
    if not all(whole):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
