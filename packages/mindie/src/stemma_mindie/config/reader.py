"""What the entry point ``stemma.config_readers`` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stemma.config.readers import ForeignSettings, KeyRow
from stemma_mindie.config.explain import key_rows
from stemma_mindie.config.translate import translate_mindie


class MindIEReader:
    """Reads MindIE's ``config.json``."""

    server = "MindIE"

    def read(self, file: Path, environ: Mapping[str, str]) -> ForeignSettings:
        """Return what a file means here. Raises ConfigError."""
        return translate_mindie(file, environ)

    def rows(self) -> list[KeyRow]:
        """Return all keys in the order of the file."""
        return key_rows()


READER = MindIEReader()
