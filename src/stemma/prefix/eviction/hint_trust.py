"""What clients' hints of priority claim, which `reuse_trust.py` judges.

A hint claims that blocks come back more, or less, often than others of their class: by a factor of 2 for
every 10 points of priority.
"""

from __future__ import annotations

from stemma.types import DEFAULT_PRIORITY, RetentionHint

_LONG_S = 900.0
"""A longer time to live is another claim than a short one."""
_LIFETIMES = 3
_STEPS = 5


def level_of(hint: RetentionHint) -> int:
    """Return the number of what a hint claims: priority in tens, and whether it ends soon, late, never."""
    step = round((hint.priority - DEFAULT_PRIORITY) / 10)
    lifetime = 0 if hint.ttl_s is None else 1 if hint.ttl_s <= _LONG_S else 2
    return (step + _STEPS) * _LIFETIMES + lifetime


HINT_CLAIMS = tuple(2.0 ** (level // _LIFETIMES - _STEPS) for level in range((2 * _STEPS + 1) * _LIFETIMES))
"""The factor that hints of each level claim."""
