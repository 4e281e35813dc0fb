"""What a replica's load costs a request, in seconds: waiting for prompts and for a seat, slower decoding.

A replica of Stemma's tells its seats and its speeds (`told.py`). Of others nothing is known but how long
first bytes took: then a running answer counts as a few prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stemma.told import ToldLoad

_UNKNOWN_PREFILL_S = 1e-4
"""Seconds for a prompt token, as long as none is known of any replica."""
_UNKNOWN_SEAT_S = 5.0
"""How long an answer has its seat, until the replica tells: waiting for one mostly takes longer than
computing a prompt."""
_UNKNOWN_ANSWER_TOKENS = 256.0
_RUNNING_TOKENS = 16
"""Cost of a running answer where decoding isn't known, in prompt tokens: its decodes share the steps."""
_ALIKE = 2.0
_FULL_KV = 0.9
"""Share of the KV blocks in use beyond which a queue waits for blocks, whatever seats are free."""


class ServerLoad(Protocol):
    """The part of `routers.ReplicaLoad` that costs go by."""

    num_tokens: int
    num_running: int
    told: ToldLoad | None
    prefill_s: float | None

    @property
    def num_there(self) -> int:
        """Requests that it has, whoever sent them."""


def prefill_speeds(loads: Sequence[ServerLoad]) -> list[float]:
    """Return seconds for a prompt token of each replica: as told, as measured, or as the others are.

    Replicas within `_ALIKE` of the median count as equals: else noise would choose the homes of new prefixes,
    and routers beside each other would disagree on them.
    """
    known = [
        load.prefill_s if load.told is None else load.told.prefill_s_per_token or load.prefill_s
        for load in loads
    ]
    given = sorted(one for one in known if one is not None)
    median = given[(len(given) - 1) // 2] if given else _UNKNOWN_PREFILL_S
    return [median if one is None or 1 / _ALIKE < one / median < _ALIKE else one for one in known]


def seats_of(told: ToldLoad) -> int:
    """Return how many answers a replica computes at once: fewer than its seats where its KV is full."""
    is_full = told.waiting > 0 and told.running > 0 and told.kv_in_use >= _FULL_KV
    return min(told.seats, told.running) if is_full else told.seats


def waiting_s(load: ServerLoad, prefill_s: float) -> float:
    """Return how long a further request waits for prompts before it, and for a seat."""
    prompts_s = load.num_tokens * prefill_s
    if load.told is None:
        return prompts_s
    seats = seats_of(load.told)
    num_before = max(0, load.num_there - seats + 1)  # answers that end before it has a seat
    return prompts_s + num_before * (load.told.seat_s or _UNKNOWN_SEAT_S) / seats


def decoding_s(load: ServerLoad, max_output: int | None, prefill_s: float) -> float:
    """Return how much a further answer is slowed, and slows the others, by sharing their steps."""
    told = load.told
    if told is None:
        return _RUNNING_TOKENS * load.num_running * prefill_s
    num_tokens = told.answer_tokens or _UNKNOWN_ANSWER_TOKENS
    if max_output is not None:
        num_tokens = min(num_tokens, max_output)
    num_beside = min(load.num_there, seats_of(told) - 1)
    return 2 * num_beside * num_tokens * (told.row_s or 0.0)
