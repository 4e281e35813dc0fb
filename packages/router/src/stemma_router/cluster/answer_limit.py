"""How long to wait for a whole answer before another server is asked.

It should never end an answer that is being computed: that would be computed twice, when servers have most to
do. So it is a multiple of what the answer can take at the most, with all tokens that it may have, at the
slowest gap between tokens that the server tells; and every request that it has beside this one counts as if
it were computed before, and were as long.
"""

from __future__ import annotations

_LEAST_S = 30.0
_SLACK = 4.0
_LONGEST_S = 3600.0
"""Beyond it nobody is asked instead."""


def answer_limit_s(
    prefill_s: float, max_output: int | None, decode_s_per_token: float | None, num_beside: int
) -> float | None:
    """Return the seconds until a whole answer is late; None: it never is, as nobody knows how long it takes.

    `prefill_s`: until the prompt is late; `max_output`: tokens that the answer may have; `num_beside`: other
    requests of the server.
    """
    if max_output is None or (max_output and decode_s_per_token is None):
        return None
    decode_s = max_output * (decode_s_per_token or 0.0)
    limit_s = _LEAST_S + prefill_s + (_SLACK + num_beside) * decode_s
    return limit_s if limit_s <= _LONGEST_S else None
