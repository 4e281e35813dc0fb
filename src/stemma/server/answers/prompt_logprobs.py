"""Log-probabilities of a prompt in the shapes of vLLM and of OpenAI's plain completions with ``echo``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.server.answers.logprobs import FLOOR, TextOf


def entries(found: PromptLogprobs, num_top: int) -> Iterator[TokenLogprob]:
    """Yield the log-probabilities of the prompt's tokens from the second on, with `num_top` likeliest."""
    tops = zip(found.top_ids[:, :num_top].tolist(), found.top_logprobs[:, :num_top].tolist(), strict=True)
    own = zip(found.token_ids[1:].tolist(), found.logprobs.tolist(), strict=True)
    for (token_id, logprob), (ids, values) in zip(own, tops, strict=True):
        yield TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))


def vllm_prompt_logprobs(text_of: TextOf, found: PromptLogprobs, num_top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: for each token its own entry and those of the likeliest, by id.

    The first token has None. Work for a thread: decodes a text for each token.
    """
    shown: list[dict[str, Any] | None] = [None]
    for entry, rank in zip(entries(found, num_top), found.ranks.tolist(), strict=True):
        own = {str(entry.token_id): _entry(text_of, entry.token_id, entry.logprob, rank)}
        for number, (token_id, logprob) in enumerate(entry.top, 1):
            own.setdefault(str(token_id), _entry(text_of, token_id, logprob, number))
        shown.append(own)
    return shown


def _entry(text_of: TextOf, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": text_of(token_id)}
