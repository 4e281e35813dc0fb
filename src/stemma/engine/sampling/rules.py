"""The rules of planned draws as numbers, for a device that applies them by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stemma.model.opened.draw_rules import ROW, DrawRules

if TYPE_CHECKING:
    from stemma.engine.sampling.sampler import Row


_MOST = 2**31 - 1
"""More than any vocabulary, and what a word holds."""


def rules_of(rows: Sequence[Row]) -> DrawRules:
    """Return what `rows` are drawn by."""
    rules = DrawRules(np.zeros(len(rows), dtype=ROW), {}, {}, {})
    for i, row in enumerate(rows):
        params, constraints = row.state.params, row.state.constraints
        top_k = min(max(0, params.top_k), _MOST)
        rules.rows[i] = (
            *(0, 0, 0, 0, 0, params.greedy, top_k, 1.0 if params.greedy else params.divisor, params.min_p),
            *(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
            *(row.uniform, params.top_p),
        )
        if constraints is not None:
            if (mask := constraints.bits(row.ahead)) is not None:
                rules.masks[i] = mask
            if constraints.forced_end(row.ahead) is not None:
                continue
        if row.state.has_penalties:
            rules.seen[i] = row.state.token_counts(row.ahead)
        added = {} if constraints is None else dict(constraints.bias)
        added |= dict.fromkeys(row.state.masked_ids(row.position), -np.inf)
        if added:
            rules.added[i] = added
    return rules
