"""Mean and deviation of a measured value, the latest counting most: as TCP does with times (RFC 6298)."""

from __future__ import annotations

_MEAN_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4


class Smoothed:
    """A measured time in seconds."""

    def __init__(self, assumed_s: float = 0.0) -> None:
        """`assumed_s`: its mean until it is measured."""
        self.num_samples = 0
        self.mean_s = assumed_s
        self._deviation_s = assumed_s / 4

    @property
    def slowest_s(self) -> float:
        """What it hardly ever is beyond: the mean and four deviations."""
        return self.mean_s + _DEVIATIONS * self._deviation_s

    def observe(self, seconds: float) -> None:
        """Note a measured value."""
        if self.num_samples == 0:
            self.mean_s, self._deviation_s = seconds, seconds / 2
        else:
            self._deviation_s += _DEVIATION_GAIN * (abs(seconds - self.mean_s) - self._deviation_s)
            self.mean_s += _MEAN_GAIN * (seconds - self.mean_s)
        self.num_samples += 1
