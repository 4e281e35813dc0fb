"""Log-probabilities of a prompt in the shapes of vLLM and of OpenAI's plain completions with ``echo``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.server.answers.logprobs import FLOOR, TextOf
from stemma.types import TokenArray


def entries(found: PromptLogprobs, num_top: int) -> Iterator[TokenLogprob]:
    """Yield the log-probabilities of the prompt's tokens from the second on, with `num_top` likeliest."""
    tops = zip(found.top_ids[:, :num_top], found.top_logprobs[:, :num_top], strict=True)
    own = zip(found.token_ids[1:].tolist(), found.logprobs.tolist(), strict=True)
    for (token_id, logprob), (ids, values) in zip(own, tops, strict=True):  # row by row: lists are larger
        yield TokenLogprob(token_id, logprob, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def id_list(token_ids: TokenArray) -> orjson.Fragment:
    """Return ids as a list for JSON, written once however often an answer repeats it."""
    return orjson.Fragment(orjson.dumps(token_ids.tolist()))


def vllm_prompt_logprobs(text_of: TextOf, found: PromptLogprobs, num_top: int) -> orjson.Fragment:
    """Return vLLM's ``prompt_logprobs``: for each token its own entry and those of the likeliest, by id.

    The first token has null. Work for a thread: decodes a text for each token. Written token by token, since
    what Python holds of an entry is many times its JSON.
    """
    shown = bytearray(b"[null")  # one buffer: what orjson returns holds several times its length
    for entry, rank in zip(entries(found, num_top), found.ranks.tolist(), strict=True):
        own = {str(entry.token_id): _entry(text_of, entry.token_id, entry.logprob, rank)}
        for number, (token_id, logprob) in enumerate(entry.top, 1):
            own.setdefault(str(token_id), _entry(text_of, token_id, logprob, number))
        shown += b"," + orjson.dumps(own)
    return orjson.Fragment(bytes(shown + b"]"))


def _entry(text_of: TextOf, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": text_of(token_id)}
