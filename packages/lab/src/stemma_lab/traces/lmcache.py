"""LMCache's agentic traces: a line a turn, with the whole conversation so far as messages.

The data set comes as parquet; its rows as JSONL are::

    {"session_id": "swe-7", "model": "m", "input": [{"role": "user", "content": "..."}],
     "output_length": 52, "pre_gap": 0.7}

`pre_gap` is in seconds, from the end of the session's answer before. Prompts are hashed here and dropped.
Its rows are under licences of their own; none is in this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stemma.errors import TraceError
from stemma.prefix.eviction.policy import Ending
from stemma_lab.traces.aiperf import BEGINNINGS_EVERY_S, TOKENS_PER_S
from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.openai_chat import ChatTokenizer, chain_ids, tokens_of
from stemma_lab.traces.request import LineFormat, TraceRequest, take, take_count, take_number

_MOST_S = 1e9
_FOLLOWS = {"tool": Ending.TOOL, "user": Ending.TURN}


@dataclass(slots=True)
class _Session:
    number: int
    ends_s: float
    """When its latest answer ended."""
    turn: int = 0


class LmcacheFormat(LineFormat):
    """Needs a tokenizer: block boundaries fall on tokens. Keeps when each session's latest answer ended."""

    name: ClassVar[str] = "lmcache"
    caveats: ClassVar[tuple[str, ...]] = (
        f"sessions have no common clock: one begins every {BEGINNINGS_EVERY_S:.0f} s",
        f"gaps count from an answer's end; answers are taken to come at {TOKENS_PER_S:.0f} tokens a second",
        "sessions of several models are replayed as if of one",
    )

    def __init__(self, tokenizer: ChatTokenizer, block_size: int = 16) -> None:
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._sessions: dict[str, _Session] = {}

    @staticmethod
    def recognises(record: Mapping[str, object]) -> bool:
        """Tell whether a first record looks like this format."""
        return {"session_id", "input", "pre_gap"} <= record.keys()

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line; a damaged one changes nothing of its session."""
        record = parse_object(line, number)
        name = take(record, "session_id", number)
        if not isinstance(name, str):
            raise TraceError(f"field 'session_id' isn't text: {name!r:.80}", line_number=number)
        messages = take(record, "input", number)
        tokens = tokens_of(self._tokenizer, messages, None, ("input", number))
        gap_s = take_number(record, "pre_gap", number)
        if not 0.0 <= gap_s <= _MOST_S:
            raise TraceError(f"field 'pre_gap' is outside 0 to {_MOST_S:.0f} s: {gap_s}", line_number=number)
        num_output = take_count(record, "output_length", number)
        begins = len(self._sessions) * BEGINNINGS_EVERY_S
        session = self._sessions.setdefault(name, _Session(len(self._sessions), begins))
        at_s = session.ends_s + gap_s
        session.turn += 1
        session.ends_s = at_s + num_output / TOKENS_PER_S
        ids = chain_ids(tokens, self.block_size)
        return TraceRequest(
            timestamp_s=at_s,
            block_ids=ids,
            input_tokens=len(tokens),
            output_tokens=num_output,
            num_prompt_blocks=len(ids),
            session=session.number,
            turn=session.turn,
            gap_s=gap_s if session.turn > 1 else None,
            follows=_follows(messages) if session.turn > 1 else Ending.UNKNOWN,
        )


def _follows(messages: Any) -> Ending:
    """Return who went on after the answer before: the last message is theirs."""
    role = messages[-1].get("role") if messages else None
    return _FOLLOWS.get(role, Ending.UNKNOWN) if isinstance(role, str) else Ending.UNKNOWN
