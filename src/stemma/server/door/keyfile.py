"""The file of API keys: each key belongs to a tenant, and only hashes of keys are stored.

    server_secret = "9f3c..."            # namespaces are derived from it; `stemma keys new` makes one

    [tenants.ada]
    keys = ["sha256:2c26b46b68ff..."]    # `stemma keys new FILE --tenant ada` adds one and prints the key
    requests_per_minute = 600
    tokens_per_minute = 200000
    max_concurrent = 16
    cache_bytes = { device = "2GB", disk = "50GB" }

Keys are 256 random bits, so a plain SHA-256 can't be searched. A key is looked up by its hash: the time that
a lookup takes tells nothing of the keys in the file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stemma.config.sizes import ByteSize
from stemma.config.words import warn_if_others_read
from stemma.errors import ConfigError
from stemma.types import Tier

_log = logging.getLogger(__name__)

KEY_PREFIX = "sk-stemma-"
LOOK_EVERY_S = 1.0
"""How often `refresh` looks whether the file has changed."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class TenantEntry(BaseModel):
    """One tenant as the file has it. A limit that isn't given is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[str, ...] = ()
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and output tokens together."""
    max_concurrent: int | None = Field(default=None, ge=1)
    max_body_bytes: ByteSize | None = None
    """Largest request body, where that is less than the server's own limit."""
    cache_bytes: Mapping[Tier, ByteSize] = {}
    """Bytes that the tenant's blocks may take in each tier."""

    @field_validator("keys")
    @classmethod
    def _are_hashes(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if not _HASH.fullmatch(key):
                raise ValueError("a key is stored as sha256:<64 hex digits>; `stemma keys new` writes one")
        return keys


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the file of keys: its name and its entry."""

    name: str
    entry: TenantEntry


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    server_secret: str = Field(min_length=32)
    tenants: Mapping[str, TenantEntry] = {}


class KeyFile:
    """The keys of one file; `reload` reads it again. Reads are safe from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._next_look = clock() + LOOK_EVERY_S
        self._secret, self._by_hash = _read(path)
        warn_if_others_read(path)

    def reload(self) -> None:
        """Read the file again. Raises ConfigError and keeps what it has if the file can't be used."""
        self._secret, self._by_hash = _read(self._path)

    def refresh(self) -> None:
        """Read the file again if it has changed; looks once a second at most. Logs why it can't be used."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.reload()
        except ConfigError as error:
            _log.error("the API keys stay as they were: %s", error)

    def tenant_of(self, key: str) -> Tenant | None:
        """Return whose `key` is, or None."""
        return self._by_hash.get(hash_of(key))

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants that have a key, by name."""
        by_name = {tenant.name: tenant for tenant in self._by_hash.values()}
        return tuple(by_name[name] for name in sorted(by_name))

    @property
    def secret(self) -> bytes:
        """The server's secret, which namespaces are derived from."""
        return self._secret


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what differs between two versions of a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def hash_of(key: str) -> str:
    """Return how the file stores `key`."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def add_key(path: Path, tenant: str) -> str:
    """Add a fresh key of `tenant` to the file, which is made if need be, and return the key.

    The file is replaced as a whole and readable by its owner only. Raises ConfigError.
    """
    if not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"{tenant!r} is no name of a tenant: letters, digits, '.', '_' and '-', 64 at most")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    data: dict[str, Any] = {"server_secret": secrets.token_hex(32), "tenants": {}}
    if path.exists():
        _read(path)
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    entry = data.setdefault("tenants", {}).setdefault(tenant, {})
    entry["keys"] = [*entry.get("keys", ()), hash_of(key)]
    _write(path, data)
    return key


def _read(path: Path) -> tuple[bytes, dict[str, Tenant]]:
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"can't read the API keys in {path}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error
    by_hash: dict[str, Tenant] = {}
    for name, entry in file.tenants.items():
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(f"{path}: {name!r} is no name of a tenant")
        for stored in entry.keys:
            if stored in by_hash:
                raise ConfigError(f"{path}: {name} and {by_hash[stored].name} have the same key")
            by_hash[stored] = Tenant(name, entry)
    return file.server_secret.encode(), by_hash


def _write(path: Path, data: Mapping[str, Any]) -> None:
    text = "\n".join([f'server_secret = "{data["server_secret"]}"', *map(_section, data["tenants"].items())])
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        Path(temporary).replace(path)  # mkstemp makes files of mode 0600
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error}") from error


def _section(item: tuple[str, Mapping[str, Any]]) -> str:
    name, entry = item
    lines = [f'\n[tenants."{name}"]']
    for key, value in entry.items():
        if key == "keys":
            lines.append("keys = [" + ", ".join(f'"{stored}"' for stored in value) + "]")
        elif isinstance(value, Mapping):
            parts = (f"{tier} = {_literal(size)}" for tier, size in value.items())
            lines.append(f"{key} = {{ {', '.join(parts)} }}")
        else:
            lines.append(f"{key} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _literal(value: int | str) -> str:
    return str(value) if isinstance(value, int) else f'"{value}"'
