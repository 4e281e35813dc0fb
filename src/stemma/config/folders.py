"""Where this user's files of Stemma lie."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/stemma`` (default ``~/.cache/stemma``); it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stemma"


def state_folder() -> Path:
    """Return ``$XDG_STATE_HOME/stemma`` (default ``~/.local/state/stemma``); it may not exist yet."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "stemma"
