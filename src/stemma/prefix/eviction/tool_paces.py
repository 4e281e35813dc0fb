"""ToolPaces: how long tools take, by name, as the conversations show that wait for them.

Few levels stand for all tools, so that each has enough lifetimes to learn hazards from. A tool counts once
some calls of it have come back; until then it is a tool like any other.
"""

from __future__ import annotations

import math
from bisect import bisect_left

NUM_PACES = 4
"""Level 0: not known."""
_EDGES_S = (5.0, 30.0)
_MIN_CALLS = 5
_GAIN = 0.05
_MAX_TOOLS = 1024
"""Names beyond aren't told apart: nobody can fill memory with them."""
_MAX_LETTERS = 128


class ToolPaces:
    """Mean pause, on a log scale, after an answer that calls each set of tools."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._num_calls = [0]
        self._means = [0.0]

    def number_of(self, tools: tuple[str, ...]) -> int:
        """Return the number of these tools, 0 for none and for those that aren't told apart."""
        if not tools:
            return 0
        name = "\n".join(sorted(set(tools)))[:_MAX_LETTERS]
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) >= _MAX_TOOLS:
                return 0
            number = self._numbers[name] = len(self._means)
            self._num_calls.append(0)
            self._means.append(0.0)
        return number

    def learn(self, number: int, pause_s: float) -> None:
        """Note that a conversation came back so long after it called these tools."""
        if number:
            self._num_calls[number] += 1
            gain = max(_GAIN, 1.0 / self._num_calls[number])
            self._means[number] += gain * (math.log(max(pause_s, 1e-3)) - self._means[number])

    def level(self, number: int) -> int:
        """Return how slow these tools are, from 1; 0 if it isn't known."""
        if self._num_calls[number] < _MIN_CALLS:
            return 0
        return 1 + bisect_left(_EDGES_S, math.exp(self._means[number]))
