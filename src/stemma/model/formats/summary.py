"""Summary of how a checkpoint's weights are held, for the line that a server prints at its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAME = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class FormatCounts:
    """Numbers of a checkpoint's weights by their format in the file; a tensor that stacks experts is one."""

    kept: Mapping[str, int] = field(default_factory=dict)
    """Those that were read quantized."""
    widened: Mapping[str, int] = field(default_factory=dict)
    """Those that were read as plain numbers of the model's dtype."""
    num_quantized: int = 0
    """Products whose weight was read quantized; each expert is one."""

    def describe(self, dtype: str, num_packed: int) -> str:
        """Return e.g. ``210 Q4_1, 1 Q8_0 kept quantized; 1 Q6_K as bfloat16``; empty for plain numbers.

        `num_packed`: products that compute with codes.
        """
        if not num_packed or not self.num_quantized:  # codes may come from `--quantize`
            return self._plain({**Counter(self.kept) + Counter(self.widened)}, dtype)
        kept = f"{_listed(self.kept)} kept quantized"
        if num_packed < self.num_quantized:
            kept += f", {self.num_quantized - num_packed} of {self.num_quantized} products as {dtype}"
        return "; ".join(part for part in (kept, self._plain(self.widened, dtype)) if part)

    def _plain(self, counts: Mapping[str, int], dtype: str) -> str:
        changed = {name: count for name, count in counts.items() if name != _SAME.get(dtype)}
        return f"{_listed(changed)} as {dtype}" if changed else ""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
