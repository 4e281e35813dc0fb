"""Receipts: 1,000 answers of all kinds, signed by servers, verified in another process; the cost to sign.

    python -m benchmarks.receipts [--count 1000] [--folder DIR]

Tiny checkpoints, as the tests build them: a plain model with adapters, grammars and drafts, a hybrid of
recurrent layers and a vision model. Prints how many receipts of each were found the same, and how long the
observer took to sign beside the time of the whole answers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

from packages.receipts.tests.kinds import pictures, texts
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
