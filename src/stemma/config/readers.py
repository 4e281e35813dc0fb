"""Other servers' configuration files, which packages beside this one read.

A package registers its reader in the entry point group ``stemma.config_readers``, under the file's suffix
without the dot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stemma import guests
from stemma.errors import ConfigError

GROUP = "stemma.config_readers"
_BROUGHT_BY = {"json": ("MindIE's config.json", "stemma-mindie")}
"""By suffix: what such a file is, and the package that reads it."""


@dataclass(slots=True)
class ForeignSettings:
    """What a file means here."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """By flat name: the value of a setting, and where it came from."""
    notes: list[str] = field(default_factory=list)
    """What the operator should know, one line each."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key of such a file, and what it does here."""

    section: str
    key: str
    default: str
    limits: str
    does: str
    """`WORKS` or `NO_EFFECT`."""
    detail: str
    """The setting that it becomes, or why it has no effect."""
    description: str

    @property
    def name(self) -> str:
        """Section and key."""
        return f"{self.section}.{self.key}" if self.section else self.key


WORKS, NO_EFFECT = "works", "accepted without effect"


class ConfigReader(Protocol):
    """Reads the files of one other server."""

    server: str
    """Its name."""

    def read(self, file: Path, environ: Mapping[str, str]) -> ForeignSettings:
        """Return what a file means here. Raises ConfigError."""

    def rows(self) -> list[KeyRow]:
        """Return all keys in the order of the file."""


def reader_of(file: Path) -> ConfigReader:
    """Return what reads a file. Raises ConfigError if nothing does, and says what to install."""
    suffix = file.suffix.removeprefix(".").lower()
    reader: ConfigReader | None = guests.load(GROUP, suffix)
    if reader is not None:
        return reader
    what, package = _BROUGHT_BY[suffix]
    raise ConfigError(
        f"{file}: {what} is read by {guests.to_install(package)}. Stemma's own files are TOML and YAML"
    )


def installed_readers() -> list[ConfigReader]:
    """Return the readers of all installed packages. Raises ConfigError if one can't be imported."""
    return [guests.load(GROUP, suffix) for suffix in guests.names(GROUP)]
