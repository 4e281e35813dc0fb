"""Where an endpoint picker listens, and with what certificate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stemma.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PickerOptions:
    """Raises ConfigError if a certificate has no key, or a key no certificate."""

    address: str
    """``127.0.0.1:9002``; port 0: any free one."""
    cert: Path | None = None
    """PEM; without it connections are neither encrypted nor authenticated."""
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("an endpoint picker's certificate and its key go together")
