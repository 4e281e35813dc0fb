"""Published prefixes: token sequences whose blocks all tenants share, by an operator's word.

A request whose prompt begins with whole blocks of a published prefix reads and writes these blocks in the
public namespace; everything behind them stays in its own. So the public namespace holds the KV of published
tokens and nothing else, and what a hit in it tells is what the operator has told everybody.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stemma.errors import ConfigError, InvalidRequest, NotFound, StorageError
from stemma.prefix.keys import Namespace, PublicHead
from stemma.types import TokenArray, as_tokens

MAX_PUBLISHED = 256
MAX_PUBLISHED_TOKENS = 1 << 20
"""Tokens of all published prefixes together."""
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """One published prefix."""

    publish_id: str
    name: str
    adapter: str
    tokens: TokenArray
    """Whole blocks."""
    created_at: float
    """Seconds since 1970."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    publish_id: str = Field(min_length=1, max_length=64)
    name: str = Field(default="", max_length=256)
    adapter: str = Field(default="", max_length=256)
    token_ids: list[int] = Field(min_length=1, max_length=MAX_PUBLISHED_TOKENS)
    created_at: float


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=1, le=1)
    prefixes: list[_Entry] = Field(max_length=MAX_PUBLISHED)


class PublishedPrefixes:
    """The published prefixes of one server. Used on the event loop only."""

    def __init__(self, path: Path | None, block_size: int, clock: Callable[[], float] = time.time) -> None:
        """`path` keeps them over restarts; None: they are dropped at the end. Raises ConfigError."""
        self._path = path
        self._block_size = block_size
        self._clock = clock
        self._changing = asyncio.Lock()
        self._prefixes: tuple[Published, ...] = () if path is None else _read(path)

    @property
    def is_kept(self) -> bool:
        """Whether a restart finds them again."""
        return self._path is not None

    @property
    def prefixes(self) -> tuple[Published, ...]:
        """All of them, oldest first."""
        return self._prefixes

    async def add(self, tokens: TokenArray, name: str = "", adapter: str = "") -> Published:
        """Publish the whole blocks of `tokens`; what is published already is returned as it is.

        Raises InvalidRequest if there is no whole block or no more room, StorageError if the file can't be
        written; then nothing has changed.
        """
        whole = tokens[: len(tokens) // self._block_size * self._block_size].copy()
        if not len(whole):
            message = f"the prefix has {len(tokens)} tokens; a block has {self._block_size}, and only "
            raise InvalidRequest(f"{message}whole blocks are shared", param="prompt")
        async with self._changing:
            for known in self._prefixes:
                if known.adapter == adapter and np.array_equal(known.tokens, whole):
                    return known
            total = sum(len(known.tokens) for known in self._prefixes) + len(whole)
            if len(self._prefixes) >= MAX_PUBLISHED or total > MAX_PUBLISHED_TOKENS:
                limits = f"{MAX_PUBLISHED} prefixes of {MAX_PUBLISHED_TOKENS} tokens together"
                raise InvalidRequest(f"a server publishes at most {limits}; unpublish one", param="prompt")
            made = Published(uuid.uuid4().hex[:16], name, adapter, whole, self._clock())
            await self._change((*self._prefixes, made))
            return made

    async def remove(self, publish_id: str) -> Published:
        """Unpublish; requests that run keep their blocks. Raises NotFound or StorageError."""
        async with self._changing:
            found = next((one for one in self._prefixes if one.publish_id == publish_id), None)
            if found is None:
                raise NotFound(f"there is no published prefix {publish_id!r}", param="publish_id")
            await self._change(tuple(one for one in self._prefixes if one is not found))
            return found

    def located(self, namespace: Namespace, tokens: TokenArray) -> Namespace:
        """Return `namespace` with the public head of the prompt `tokens`, if it begins with one.

        The longest run of whole blocks that it has in common with a published prefix. O(common tokens).
        """
        longest, size = 0, self._block_size
        for known in self._prefixes if len(tokens) else ():
            if known.adapter != namespace.adapter or known.tokens[0] != tokens[0]:
                continue
            length = min(len(known.tokens), len(tokens))
            differs = np.flatnonzero(known.tokens[:length] != tokens[:length])
            common = int(differs[0]) if len(differs) else length
            longest = max(longest, common // size * size)
        return namespace if not longest else replace(namespace, head=PublicHead.of(tokens[:longest]))

    async def _change(self, prefixes: tuple[Published, ...]) -> None:
        if self._path is not None:
            await asyncio.to_thread(_write, self._path, prefixes)
        self._prefixes = prefixes


def _read(path: Path) -> tuple[Published, ...]:
    """Return what a file holds; nothing if there is none yet."""
    try:
        if not path.exists():
            return ()
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is too large for a file of published prefixes")
        file = _File.model_validate_json(path.read_bytes())
        found = [
            Published(one.publish_id, one.name, one.adapter, as_tokens(one.token_ids), one.created_at)
            for one in file.prefixes
        ]
    except (OSError, ValueError, OverflowError) as error:
        reason = error.errors(include_input=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"can't read the published prefixes in {path}: {reason}") from error
    if any(int(one.tokens.min()) < 0 for one in found):
        raise ConfigError(f"can't read the published prefixes in {path}: a token id is negative")
    return tuple(found)


def _write(path: Path, prefixes: tuple[Published, ...]) -> None:
    """Replace the file as a whole; readable by its owner only."""
    entries: list[dict[str, Any]] = [
        {
            "publish_id": one.publish_id,
            "name": one.name,
            "adapter": one.adapter,
            "created_at": one.created_at,
            "token_ids": one.tokens.tolist(),
        }
        for one in prefixes
    ]
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"version": 1, "prefixes": entries}, out)
        Path(temporary).replace(path)
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}") from error
