"""How many sequences may run at once, unless a setting fixes it, and how many tokens a step takes.

Two limits of sequences are learned, and the smaller one counts:

- memory: a preemption shows that too many ran. Their number falls to those that are left, and grows by one
  each time as many sequences have ended without another preemption (additive increase, as in TCP);
- time: a step of decodes should take at most `MAX_STEP_S`, so that a new prompt doesn't wait long for its
  turn. The number of sequences at which it would is predicted from the steps measured so far.

Throughput doesn't fall with more seats, since a step's fixed cost is shared by more tokens. What falls is the
speed of each answer; what grows is the number of requests whose first token comes soon.

A step with prompts should take no longer either, while others wait for it to end: those that decode, and
those that want to start. So its number of tokens follows from what a token took in the steps before.
"""

from __future__ import annotations

from stemma.config.settings import MAX_SEATS
from stemma.engine.drafts.adaptive import StepCost

MIN_SEATS = 16
MAX_STEP_S = 0.5
MIN_PROMPT_TOKENS = 128
IDLE_STEP_S = 0.05
"""A step that prepares: a request that comes meanwhile waits for its end."""
MIN_IDLE_TOKENS = 16
FIRST_STEP_TOKENS = 512
"""Until a step has been measured."""
WHOLE_TOKENS = 256
"""Steps of more tokens take the nearest multiple: kernels read weights once for these rows (products.h)."""


class Seats:
    """The number of sequences that may run at once. One owner, the step loop."""

    def __init__(self, fixed: int | None, most: int = MAX_SEATS) -> None:
        """`fixed`: the operator's number, which nothing changes; None: up to `most`, as measured."""
        self._most = fixed or most
        self._is_fixed = fixed is not None
        self._by_memory = float(self._most)
        self._cost = StepCost()

    @property
    def limit(self) -> int:
        """The number now, at least 1."""
        if self._is_fixed:
            return self._most
        by_time = self._cost.rows_within(MAX_STEP_S)
        measured = self._most if by_time is None else max(MIN_SEATS, by_time)
        return max(1, min(self._most, measured, int(self._by_memory)))

    def note_preemption(self, num_running: int) -> None:
        """A sequence was preempted; `num_running` are left."""
        self._by_memory = max(1.0, min(self._by_memory, float(num_running)))

    def note_end(self) -> None:
        """A sequence ended by itself."""
        self._by_memory = min(float(self._most), self._by_memory + 1.0 / self._by_memory)

    @property
    def row_s(self) -> float:
        """Seconds that one more answer adds to a step of decodes; 0 until steps were measured."""
        return self._cost.row_s

    def note_step(self, num_rows: int, num_context_tokens: int, duration_s: float) -> None:
        """Learn from a step of decodes alone; `num_context_tokens` is the sum over its sequences."""
        self._cost.observe(num_rows, num_context_tokens, num_rows, duration_s)


class StepTokens:
    """How many tokens a step takes while others wait for its end. One owner, the step loop."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of any step."""
        self._most = most
        self._token_s: float | None = None

    def limit(self, num_decoding: int) -> int:
        """Return the number for a step beside `num_decoding` decodes, which it includes.

        Prompts get `MIN_PROMPT_TOKENS` of them whatever they take, or they would never start.
        """
        wanted = FIRST_STEP_TOKENS if self._token_s is None else int(MAX_STEP_S / self._token_s)
        if wanted > WHOLE_TOKENS:
            wanted = round(wanted / WHOLE_TOKENS) * WHOLE_TOKENS
        return min(self._most, max(wanted, num_decoding + MIN_PROMPT_TOKENS))

    @property
    def token_s(self) -> float | None:
        """Seconds that a token of a prompt takes; None: no step was measured."""
        return self._token_s

    @property
    def idle_limit(self) -> int:
        """The number for a step that nobody waits for, though somebody may come while it runs."""
        wanted = MIN_PROMPT_TOKENS if self._token_s is None else int(IDLE_STEP_S / self._token_s)
        return min(self._most, max(MIN_IDLE_TOKENS, wanted))

    def note_step(self, num_tokens: int, duration_s: float) -> None:
        """Learn from a step; those with few tokens read weights for the most part, and say little."""
        if num_tokens < MIN_PROMPT_TOKENS:
            return
        token_s = duration_s / num_tokens
        self._token_s = token_s if self._token_s is None else 0.8 * self._token_s + 0.2 * token_s
