"""Reader of a checkpoint's generation_config.json: end-of-sequence ids and sampling defaults, checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container
from typing import Any

from stemma.errors import ModelError

logger = logging.getLogger(__name__)

_MAX_SHOWN = 100
_END_OF_MESSAGE = "<|end|>"
_CALLS, _ENDS_BESIDE_CALLS = frozenset({"<|call|>", "<|calls|>"}), frozenset({"<|return|>", "<|flush|>"})
_SAMPLING_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0.0, ">= 0"),
    "top_k": (lambda value: value >= -1 and value == int(value), "a whole number >= -1"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
    "min_p": (lambda value: 0.0 <= value <= 1.0, "in [0, 1]"),
    "repetition_penalty": (lambda value: value > 0.0, "> 0"),
}


def default_sampling(generation: dict[str, Any]) -> dict[str, float | int]:
    """Return the checkpoint's sampling defaults; values invalid in a request are ignored and logged."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults: dict[str, float | int] = {}
    for name, (allowed, expected) in _SAMPLING_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared, not asked whether it is finite: JSON has whole numbers that no float holds.
        if is_number and abs(value) < math.inf and allowed(value):
            defaults[name] = int(value) if name == "top_k" else value
        else:
            logger.warning(
                "generation_config.json: %s is %s, must be %s; the field is ignored",
                name,
                repr(value)[:_MAX_SHOWN],
                expected,
            )
    return defaults


def ends_messages_only(token: str, vocabulary: Container[str]) -> bool:
    """Whether an answer may hold `token` within, as GPT-OSS' and Solar's, which have several messages.

    llama.cpp tells them apart by the same tokens.
    """
    others = (_CALLS, _ENDS_BESIDE_CALLS)
    return token == _END_OF_MESSAGE and all(any(text in vocabulary for text in texts) for texts in others)


def eos_token_ids(generation: dict[str, Any], config: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a sequence, of generation_config.json and config.json together; maybe none.

    Raises ModelError if they aren't token ids: a model that never ends would be served otherwise.
    """
    named = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": getattr(config.get_text_config(), "eos_token_id", None),
    }
    ids = [token_id for source, value in named.items() for token_id in _token_ids(source, value)]
    # Some checkpoints name ids beyond their vocabulary; those are never drawn.
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id < vocab_size))


def _token_ids(source: str, value: Any) -> list[int]:
    listed = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    for token_id in listed:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            shown = repr(value)[:_MAX_SHOWN]
            raise ModelError(f"{source}: eos_token_id {shown} is no token id and no list of them; correct it")
    return listed
