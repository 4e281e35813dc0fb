"""Log-probabilities of a drawn token, and the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def likeliest(logprobs: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids [R, K] of the `num` most likely tokens of each row of `logprobs` [R, V].

    Most likely first, and of equal ones the lowest id first, so a row's first ones depend on no other row and
    not on `num`: logits in bfloat16 are often equal. On CUDA equal ones at the last place are any, since to
    look at values would wait for the device.
    """
    num_rows, vocab_size = logprobs.shape
    num = min(num, vocab_size)
    if num == 0:
        nothing = logprobs.new_empty(num_rows, 0)
        return nothing, nothing.long()
    values, ids = torch.topk(logprobs, min(num + 1, vocab_size), dim=-1)
    if logprobs.device.type == "cpu" and num < vocab_size:
        for row in (values[:, num - 1] == values[:, num]).nonzero()[:, 0].tolist():
            last = values[row, num - 1]
            first = int((values[row] > last).sum())
            ids[row, first:num] = (logprobs[row] == last).nonzero()[: num - first, 0]
    # Two sorts, the second a stable one: by value, and by id where values are equal.
    ids, order = torch.sort(ids[:, :num], dim=-1)
    values, order = torch.sort(values[:, :num].gather(1, order), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
