"""When a sequence ends, and which of its text may be sent: stop strings, stop ids, EOS, lengths.

A stop string may begin in one token and end in a later one, so text that could be the head of a stop string
is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stemma.engine.output.detokenizer import Detokenizer
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.params import SamplingParams
from stemma.types import FinishReason


@dataclass(frozen=True, slots=True)
class Progress:
    """The effect of one more token: text that may be sent now, and whether and why the sequence ends."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id; None for EOS and for lengths."""


class StopChecker:
    """Follows the output of one sequence token by token."""

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer, ending: EndingRule) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._ending = ending
        self._num_tokens = 0
        self._held = ""
        """Text not sent yet: a proper prefix of some stop string."""

    def append(self, token_id: int) -> Progress:
        """Take the next output token; after a finish reason the sequence takes no more.

        The text of an EOS or stop token is left out unless `include_stop_str_in_output`. Up to `min_tokens`
        tokens nothing stops the sequence.
        """
        self._num_tokens += 1
        may_stop = self._ending.may_stop(self._num_tokens)
        if may_stop and self._ending.is_end(token_id):
            if self._params.include_stop_str_in_output:
                self._held += self._detokenizer.append(token_id)
            return Progress(self.flush(), FinishReason.STOP, self._ending.stop_reason(token_id))
        text = self._detokenizer.append(token_id)
        if self._params.stop:
            found = self._find_stop(text) if may_stop else None
            if found is not None:
                return found
            text = self._hold_back(text)
        if self._ending.finish_reason(token_id, self._num_tokens) is not None:
            return Progress(text + self.flush(), FinishReason.LENGTH)
        return Progress(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that don't end the sequence, where there are no stop strings."""
        self._num_tokens += len(token_ids)
        return self._detokenizer.extend(token_ids)

    def flush(self) -> str:
        """Return the text held back so far, for a sequence that is ended from outside."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _find_stop(self, text: str) -> Progress | None:
        """Look for the stop string that is complete first in held + `text`, ending in `text`."""
        buffer = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._params.stop:
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        self._held = ""
        kept = buffer[: end if self._params.include_stop_str_in_output else start]
        return Progress(kept, FinishReason.STOP, stop)

    def _hold_back(self, text: str) -> str:
        """Return held + `text` without its longest tail that begins a stop string, which is held."""
        buffer = self._held + text
        longest = 0
        for stop in self._params.stop:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        split = len(buffer) - longest
        self._held = buffer[split:]
        return buffer[:split]
