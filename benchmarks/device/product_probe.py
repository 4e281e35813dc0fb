"""Ask a GPU whether rows of a product depend on the batch, and what it costs that they don't.

`python -m benchmarks.device.product_probe --check --time --json FILE`. `--check`: the numbers of tokens whose
rows have other bits than among 2,048, of our product and of the library's. `--time`: both, in recordings of
weights in turns, so that none lies in the cache. Without a GPU `--check` runs a small shape in Triton's
interpreter (TRITON_INTERPRET=1): its error counts, its bits are those of numpy's products. There `--time` is
refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from benchmarks.device.recorded import record, replay
from stemma.model.cuda.products import CodedWeight, Weight, num_pieces
from stemma.model.weights.stored import CodedFloats

SHAPES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28_672, 4096),
    "8b down": (4096, 14_336),
    "8b head": (128_256, 4096),
    "0.5b qkv": (1152, 896),
    "0.5b o": (896, 896),
    "0.5b gate_up": (9728, 896),
    "0.5b down": (896, 4864),
    "0.5b head": (151_936, 896),
}
"""Rows and columns of weights."""
FP8 = {"fp8 8b o": (4096, 4096), "fp8 8b down": (4096, 14_336)}
"""Weights that are codes, with a scale for each 128 inputs of a row; they are only checked."""
SMALL = {"small": (256, 512), "fp8 small": (128, 256)}
COUNTS = (1, 2, 7, 8, 16, 17, 32, 33, 64, 100, 128, 129, 256, 1000, 2048)
_SMALL_COUNTS = (1, 3, 16, 17, 130)
_TIMED_COUNTS = (1, 8, 64, 256, 2048, 8192)
_MOST_HEAD_ROWS = 256
_NUM_REPLAYS = 15
_ROTATED_BYTES = 1 << 28
"""More than the cache holds."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return ``x @ w.T`` for x ``[T, K]`` and w ``[N, K]``."""
    return Weight(w)(x).join()


def _multiply_coded(weight: Weight, x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    return weight(x).join()


def check(name: str, n: int, k: int, device: torch.device) -> dict[str, object]:
    """Return the error, and the numbers of tokens with other bits, for a weight ``[n, k]``."""
    is_cuda = device.type == "cuda"
    dtype, counts = (torch.bfloat16, COUNTS) if is_cuda else (torch.float32, _SMALL_COUNTS)
    generator = torch.Generator(device).manual_seed(0)
    w = (torch.randn(n, k, device=device, generator=generator) * k**-0.5).to(dtype)
    x = torch.randn(max(counts), k, device=device, generator=generator).to(dtype)
    ours: Multiply = multiply
    if name.startswith("fp8"):
        codes, scales = (w * 256).to(torch.float8_e4m3fn), torch.full((n, k // 128), 1 / 256, device=device)
        floats = CodedFloats(codes, scales, 128, dtype)
        weight, w = Weight(CodedWeight.of_floats([floats], device)), floats.plain()
        ours = partial(_multiply_coded, weight)
    exact = x[:64].double() @ w.double().T
    error = ((ours(x, w)[:64].double() - exact).norm() / exact.norm()).item()
    return {
        "shape": name,
        "pieces": num_pieces(n, k),
        "error": float(f"{error:.1e}"),
        "ours": _differing(ours, x, w, counts),
        "ours_moved": not torch.equal(ours(x[5:6].contiguous(), w)[0], ours(x, w)[5]),
        "library": _differing(linear, x, w, counts),
    }


def _differing(of: Multiply, x: torch.Tensor, w: torch.Tensor, counts: tuple[int, ...]) -> list[int]:
    whole = of(x, w)
    return [count for count in counts if not torch.equal(of(x[:count].contiguous(), w), whole[:count])]


def timed(name: str, n: int, k: int) -> list[dict[str, object]]:
    """Return microseconds of our product and of the library's, by tokens."""
    num_weights = max(1, min(64, _ROTATED_BYTES // (2 * n * k)))
    weights = [(torch.randn(n, k, device="cuda") * k**-0.5).bfloat16() for _ in range(num_weights)]
    rows: list[dict[str, object]] = []
    for num_tokens in _TIMED_COUNTS:
        if "head" in name and num_tokens > _MOST_HEAD_ROWS:
            continue
        x = torch.randn(num_tokens, k, device="cuda").bfloat16()
        used = weights if num_tokens <= _MOST_HEAD_ROWS else weights[:4]
        ours = _mean_s(partial(multiply, x), used)
        library = _mean_s(partial(linear, x), used)
        rows.append(
            {
                "shape": name,
                "tokens": num_tokens,
                "ours_us": round(ours * 1e6, 1),
                "library_us": round(library * 1e6, 1),
                "library_over_ours": round(library / ours, 3),
                "ours_gb_s": round(2 * n * k / ours / 1e9),
                "ours_tf_s": round(2 * n * k * num_tokens / ours / 1e12, 1),
            }
        )
    return rows


def _mean_s(of: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Return the median seconds of one product, of a recording of one with each weight."""
    recording = record(lambda: [of(w) for w in weights])
    return statistics.median(replay(recording)[0] for _ in range(_NUM_REPLAYS)) / len(weights)


def main() -> None:
    """Print a line of JSON for each answer, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--json", type=Path, help="write all answers here")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.time and device.type != "cuda":
        parser.error("--time needs a GPU")
    shapes = SHAPES | FP8 if device.type == "cuda" else SMALL
    answers: list[dict[str, object]] = []

    def tell(answer: dict[str, object]) -> None:
        answers.append(answer)
        print(json.dumps(answer), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(answers, indent=1))

    for name, (n, k) in shapes.items():
        if name.startswith(given.only) or device.type != "cuda":
            if given.check:
                tell(check(name, n, k, device))
            if given.time and name not in FP8:
                for row in timed(name, n, k):
                    tell(row)


if __name__ == "__main__":
    main()
