"""The self-check at load: this server must compute what the model itself computes.

A class doesn't show whether an architecture counts positions itself, looks ahead, applies a mask that isn't
passed to us, or has its own forward that our fast path would skip. So transformers runs the unchanged model
on a few tokens; once the model is ready to serve, the same tokens run over paged KV in two chunks, and the
logits are compared. They must also be the same, bit for bit, in one chunk and in two, behind the rows of
another prompt, and near the end of the context (same_bits.py). Architectures on `TESTED` are compared with
transformers by our tests and skip this. For all architectures, logits must be finite. Of a large model only
the first layers run, enough to have each kind: an 8B model has 16 GB of weights, which each run reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.foreign_code import ForeignCode
from stemma.model.attend.attention import SUPPORTED
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.opened.same_bits import ProbePiece, check_same_bits, median_error, run_pieces

CHUNKS = (7, 6)
"""The second begins inside a block and ends in another."""
NUM_TOKENS = sum(CHUNKS)
LIMITS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Maximum error of a chunk's median token, as a share of its logits' spread.

Measured on 75 classes with random weights. Served correctly: at most 1e-6 in float32; in bfloat16 0.03 with 2
layers, 0.02 to 0.08 with 24 and 48, 0.15 for the worst mixture of experts. Served wrongly: 0.46 and more."""


_ROUNDED = {8: 0.2, 4: 0.4}
"""The same where weights have so few bits: the reference comes from the weights before they were rounded."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The model's own logits of the check's tokens."""

    token_ids: torch.Tensor
    """[T] int64, on CPU."""
    logits: torch.Tensor
    """[T, vocab] float32, on CPU."""


def check_served(
    model: CausalLM, reference: Reference | None, weight_bits: int | None = None, *, same_bits: bool
) -> None:
    """Run the check's tokens over paged KV and compare them with `reference`, if there is one.

    `same_bits`: rows are computed alike whatever stands beside them, so their bits are compared too.
    Raises ModelError if logits aren't finite, UnsupportedModel if they differ.
    """
    name = model.info.architecture
    if reference is None:
        tokens = torch.arange(1, 4) % model.vocab_size
        with ForeignCode(f"{name} fails on its first tokens"):
            [logits] = run_pieces(model, [ProbePiece(tokens)], [[(0, 0, len(tokens))]])
            check_logits(name, logits)
        return
    chunks = CHUNKS if model.max_model_len >= NUM_TOKENS else (1, model.max_model_len - 1)
    tokens = reference.token_ids[: sum(chunks)]
    with ForeignCode(f"{name} can't be served: it fails on a prompt in two chunks", f". {SUPPORTED}"):
        cut, end = chunks[0], sum(chunks)
        [logits] = run_pieces(model, [ProbePiece(tokens)], [[(0, 0, cut)], [(0, cut, end)]])
    check_logits(name, logits)
    limit = max(LIMITS.get(model.dtype, 1e-3), 0.0 if weight_bits is None else _ROUNDED[weight_bits])
    first = median_error(logits[: chunks[0]], reference.logits[: chunks[0]])
    second = median_error(logits[chunks[0] :], reference.logits[chunks[0] : len(tokens)])
    if first > limit:
        raise UnsupportedModel(
            f"{name} can't be served: over paged KV it computes other logits than by itself (off by "
            f"{first:.0%} of their spread in the first tokens). It may mask attention, or compute positions "
            f"or layers, in a way of its own. {SUPPORTED}"
        )
    if second > limit:
        raise UnsupportedModel(
            f"{name} can't be served: in a prompt's second chunk it computes other logits than by itself "
            f"(off by {second:.0%} of their spread). It may count positions itself or keep state other than "
            f"KV. {SUPPORTED}"
        )
    with ForeignCode(f"{name} can't be served: it fails beside another prompt", f". {SUPPORTED}"):
        # Without our kernels rounding depends on a row's place, about as much as it differs from theirs.
        check_same_bits(model, tokens, None if same_bits else 1e-3 + 2 * max(first, second))


def check_logits(name: str, logits: torch.Tensor) -> None:
    """Raise ModelError if logits aren't finite."""
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{name} computes logits that are NaN or infinite; the checkpoint is broken, or its numbers "
            "don't fit the dtype: try another (--dtype bfloat16 or float32)"
        )
