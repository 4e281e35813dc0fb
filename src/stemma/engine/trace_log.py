"""Recording live traffic for the lab: hashes only, salted, no text.

A file is JSONL. Its first line is a header, ``{"format": "stemma-trace", "version": 1, "block_size": 16,
"server_block_size": 64}``; then one line per finished request::

    {"timestamp_s": 12.25, "namespace": "9f...", "input_tokens": 40, "output_tokens": 9,
     "num_cached_tokens": 32, "blocks": "<base64 of little-endian 64-bit hashes>"}

`blocks` has one hash per `block_size` tokens of the prompt and, after them, of what was generated and has KV
(all but the last token); the last one may stand for a partial block. Each is a keyed BLAKE2b over its
predecessor and its tokens. The key is random, lives in memory only and differs for each recording, so equal
prefixes can be told within one recording but no text can be recovered or tested from the file.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import BinaryIO

import numpy as np
import orjson

from stemma.errors import StorageError
from stemma.prefix.keys import Namespace
from stemma.supervision import LoggingSupervisor, Supervisor, start_thread
from stemma.types import TokenArray

TRACE_FORMAT = "stemma-trace"
TRACE_VERSION = 1
_HASH_BYTES = 8
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Finished:
    timestamp_s: float
    namespace: Namespace
    prompt: TokenArray
    output: TokenArray
    num_cached_tokens: int


class TraceLog:
    """Appends finished requests to a file, on a thread of its own. `record` may be called from any thread."""

    def __init__(
        self,
        path: Path,
        block_size: int,
        server_block_size: int,
        salt: bytes | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """Open `path` for appending; `block_size` tokens get one hash. Raises StorageError."""
        self.block_size = block_size
        self._path = path
        self._salt = secrets.token_bytes(32) if salt is None else salt
        header = {
            "format": TRACE_FORMAT,
            "version": TRACE_VERSION,
            "block_size": block_size,
            "server_block_size": server_block_size,
        }
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)
            self._file.write(orjson.dumps(header) + b"\n")
        except OSError as error:
            raise StorageError(f"can't record a trace to {path}: {error}") from error
        self._queue: SimpleQueue[_Finished | None] = SimpleQueue()
        self._thread = start_thread("stemma-trace", self._run, supervisor or LoggingSupervisor())

    def record(
        self,
        timestamp_s: float,
        namespace: Namespace,
        prompt: TokenArray,
        output: TokenArray,
        num_cached_tokens: int,
    ) -> None:
        """Queue one finished request that arrived at `timestamp_s`. `prompt` must not change afterwards.

        Nothing is recorded once writing has failed.
        """
        if not self._thread.is_alive():
            return
        self._queue.put(_Finished(timestamp_s, namespace, prompt, output.copy(), num_cached_tokens))

    def close(self) -> None:
        """Write what is queued and close the file; a second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._file.close()

    def __enter__(self) -> TraceLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """Write until told to stop. A full disk ends the recording, never the server."""
        while (finished := self._queue.get()) is not None:
            try:
                self._file.write(self._line(finished))
            except OSError as error:
                logger.error("recording to %s stops: %s", self._path, error)
                break

    def _line(self, finished: _Finished) -> bytes:
        namespace = finished.namespace
        seed = self._digest(f"{len(namespace.salt)}:{namespace.salt}:{namespace.adapter}".encode(), b"")
        # The last generated token was never fed back, so it has no KV that a later prompt could reuse.
        tokens = np.concatenate((finished.prompt, finished.output[:-1]))
        line = {
            "timestamp_s": round(finished.timestamp_s, 6),
            "namespace": seed.hex(),
            "input_tokens": len(finished.prompt),
            "output_tokens": len(finished.output),
            "num_cached_tokens": finished.num_cached_tokens,
            "blocks": base64.b64encode(self._hashes(seed, tokens)).decode(),
        }
        return orjson.dumps(line) + b"\n"

    def _digest(self, state: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(state + data, digest_size=_HASH_BYTES, key=self._salt).digest()

    def _hashes(self, seed: bytes, tokens: TokenArray) -> bytes:
        """Return the hashes of all blocks.

        If the prompt ends inside a block, that block appears as the prompt's partial last block only if
        nothing was generated after it; otherwise the fuller block stands for both.
        """
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        stride = 4 * self.block_size
        state, hashes = seed, []
        for start in range(0, len(data), stride):
            state = self._digest(state, data[start : start + stride])
            hashes.append(state)
        return b"".join(hashes)
