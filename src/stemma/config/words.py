"""Settings that are lists or keys, as text: in flags, variables and files they are written the same way."""

from __future__ import annotations

import logging
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from stemma.errors import ConfigError

logger = logging.getLogger(__name__)
_MIN_SECRET_BYTES = 32


def split_words(value: Any) -> Any:
    """Return ``"a, b"`` as ``("a", "b")``; other types are returned unchanged."""
    if not isinstance(value, str):
        return value
    return tuple(word for word in (part.strip() for part in value.split(",")) if word)


def split_named_paths(value: Any) -> Any:
    """Return ``"a=x.json,b=y.json"``, or a list of such texts, as a mapping; others unchanged."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    named: dict[str, str] = {}
    for word in (word for text in value for word in split_words(text)):
        name, separator, path = word.partition("=")
        if not (name and separator and path):
            raise ValueError(f"expected NAME=PATH, separated by commas, got {word!r}")
        if name.strip() in named:
            raise ValueError(f"{name.strip()!r} is given twice")
        named[name.strip()] = path.strip()
    return named


def check_key(value: Any) -> Any:
    """Return a key; raise ValueError for an empty one, or one that no header can carry."""
    if isinstance(value, str):
        if not value:
            raise ValueError("is empty, which would give everybody access")
        if value != value.strip() or not value.isprintable():
            raise ValueError("has spaces at its ends, or characters that can't be printed")
    return value


def warn_if_others_read(path: Path) -> None:
    """Log a warning if other users of this machine may read a file of secrets."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("others may read %s, which holds a secret: chmod 600 %s", path, path)


def read_key(key: str | None, file: Path | None, name: str) -> str | None:
    """Return the key, from the setting or its file. Raises ConfigError; the message doesn't show the key."""
    if file is None:
        return key
    if key is not None:
        raise ConfigError(f"give {name} or {name}_file, not both")
    try:
        text = file.read_text(encoding="utf-8").strip()
        warn_if_others_read(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {name}_file {file}: {error}") from error
    try:
        checked: str = check_key(text)
    except ValueError as error:
        raise ConfigError(f"the key in {file} {error}") from error
    return checked


def read_secret(file: Path | None) -> bytes | None:
    """Return the secret that signs exported prefixes; no file: None. Raises ConfigError."""
    if file is None:
        return None
    try:
        secret = file.read_bytes().strip()
        warn_if_others_read(file)
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{file} must hold a secret of {_MIN_SECRET_BYTES} bytes or more: `openssl rand -hex 32`"
        )
    return secret


Words = Annotated[tuple[str, ...], BeforeValidator(split_words)]
NamedPaths = Annotated[Mapping[str, Path], BeforeValidator(split_named_paths)]
Key = Annotated[str, BeforeValidator(check_key)]
