"""Tokens as TGI's clients expect them, or as MindIE's do: the two differ where a stream names ids."""

from __future__ import annotations

from typing import Any

from stemma.engine.api import SequenceDelta
from stemma.server.turn.context import ApiContext


def token_entry(context: ApiContext, token_id: int, logprob: float | None, text: str) -> dict[str, Any]:
    """Return a token; MindIE leaves `special` null."""
    special = None if _is_mindie(context) else token_id in context.engine.tokenizer.special_token_ids
    return {"id": token_id, "logprob": logprob, "special": special, "text": text}


def stream_tokens(context: ApiContext, delta: SequenceDelta) -> list[dict[str, Any]]:
    """Return the tokens of the events of `delta`: one each, or one list of ids for MindIE's clients.

    If the tokens' own texts don't join to the delta's (parts of a character, a stop string cut off), the last
    one carries all of it. News without a token carry the end-of-sequence id.
    """
    logprobs = [entry.logprob for entry in delta.logprobs or ()]
    if _is_mindie(context):
        logprob = logprobs[0] if len(logprobs) == 1 else None
        return [{"id": list(delta.token_ids), "text": delta.text, "logprob": logprob, "special": None}]
    if not delta.token_ids:
        eos = min(context.engine.eos_token_ids, default=0)
        return [{"id": eos, "text": delta.text, "logprob": None, "special": True}]
    texts = [context.token_text(token_id) for token_id in delta.token_ids]
    if "".join(texts) != delta.text:
        texts = [""] * (len(texts) - 1) + [delta.text]
    known: list[float | None] = [*logprobs] if len(logprobs) == len(texts) else [None] * len(texts)
    return [
        token_entry(context, token_id, logprob, text)
        for token_id, logprob, text in zip(delta.token_ids, known, texts, strict=True)
    ]


def _is_mindie(context: ApiContext) -> bool:
    return context.settings.requests.dialect == "mindie"
