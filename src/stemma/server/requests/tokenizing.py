"""From text to token ids: at once where little of it is new, else off the event loop.

`salt` is that of the namespace that a request is served in: others of that salt may get ids of the same text
without a tokenizer. None: nobody may.
"""

from __future__ import annotations

from functools import partial

from stemma.server.requests.intake import Intake
from stemma.types import TokenArray

AT_ONCE_CHARS = 2048
"""New characters that are tokenized on the event loop, in 0.3 ms, or in 2 if they are chosen to take long. A
thread takes 0.1 to 3 ms to begin."""
MOST_CHARS = 1 << 17
"""Texts up to this length are looked for there, which takes less than a millisecond."""


async def tokenized(intake: Intake, text: str, *, add_special_tokens: bool, salt: str | None) -> TokenArray:
    """Return the ids of `text`. Raises ModelError, and TookTooLong after `tokenize_timeout_s`."""
    tokenizer, known = intake.engine.tokenizer, intake.known_texts
    if known is not None and salt is not None and len(text) <= MOST_CHARS:
        most = 0 if tokenizer.cuts is None else AT_ONCE_CHARS
        tokens = known.find(tokenizer, text, salt, add_special_tokens=add_special_tokens, most_new_chars=most)
        if tokens is not None:
            return tokens
    return await intake.tokenize_in_thread(
        partial(tokenize, intake, text, add_special_tokens=add_special_tokens, salt=salt)
    )


def tokenize(intake: Intake, text: str, *, add_special_tokens: bool, salt: str | None) -> TokenArray:
    """Do the same, whatever it takes; for threads. Raises ModelError."""
    tokenizer, known = intake.engine.tokenizer, intake.known_texts
    if known is None or salt is None:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return known.encode(tokenizer, text, salt, add_special_tokens=add_special_tokens)
