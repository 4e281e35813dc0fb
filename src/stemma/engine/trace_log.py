"""Recording live traffic for the lab: hashes only, salted, no text.

A file is JSONL. Its first line is a header, ``{"format": "stemma-trace", "version": 2, "epoch_s": 1.76e9,
"block_size": 16, "server_block_size": 64, "capacity_blocks": 4096, "eviction": "hazard"}``; then one line per
finished request::

    {"timestamp_s": 12.25, "namespace": "9f...", "session": "03...", "input_tokens": 40, "output_tokens": 9,
     "num_cached_tokens": 32, "cached_by_tier": {"device": 32}, "finish_reason": "stop", "ending": "tool",
     "tools": ["b1..."], "roles": "sua", "queue_wait_s": 0.01, "first_token_s": 0.1, "service_s": 1.5,
     "priority": 50, "ttl_s": null,
     "blocks": "<base64 of little-endian 64-bit hashes>"}

`timestamp_s` + `epoch_s` are seconds since 1970: runs of a server that was restarted, or rebooted, follow
each other. `capacity_blocks` counts blocks of the trace on the device. `session` is a keyed hash of what the
client calls its conversation (`prompt_cache_key`, `session_id`); "" if it names none. `roles` has a letter
for who says each of the prompt's first messages: system (or developer), user, assistant, tool; "?" for
others, "" for prompts without messages. The request held blocks from `timestamp_s` + `queue_wait_s` until
`timestamp_s` + `service_s`.

`ending` says who goes on after the answer: "tool", "turn", or "unknown"; `tools` are keyed hashes of the
names of those that it calls. The server tells both a moment after the engine is done, so a line is written
once they are known, or a second later; `kill -9` loses as much.

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
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import BinaryIO

import numpy as np
import orjson

from stemma.errors import StorageError
from stemma.prefix.eviction.policy import NO_CONCLUSION, Conclusion
from stemma.prefix.keys import Namespace
from stemma.supervision import LoggingSupervisor, Supervisor, start_thread
from stemma.types import NO_HINT, FinishReason, RetentionHint, Tier, TokenArray

TRACE_FORMAT = "stemma-trace"
TRACE_VERSION = 2
_HASH_BYTES = 8
_MAX_TOOLS = 16
_MAX_ROLES = 1024
_LETTERS = {"system": "s", "developer": "s", "user": "u", "assistant": "a", "tool": "t"}
_PATIENCE_S = 1.0
"""How long a finished request waits for its ending."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is recorded of a request; arrays must not change afterwards."""

    timestamp_s: float
    """Arrival, on the engine's clock."""
    namespace: Namespace
    prompt: TokenArray
    output: TokenArray
    cached_by_tier: Mapping[Tier, int] = field(default_factory=dict)
    session: str = ""
    finish_reason: FinishReason | None = None
    queue_wait_s: float = 0.0
    service_s: float = 0.0
    """From arrival to end."""
    hint: RetentionHint = NO_HINT
    roles: tuple[str, ...] = ()
    """Who says each message of the prompt."""
    first_token_s: float | None = None
    """From arrival to the first token; None: it has none."""


@dataclass(frozen=True, slots=True)
class _Concluded:
    """The end of an answer, whose prompt and itself are `tokens`."""

    namespace: Namespace
    tokens: TokenArray
    conclusion: Conclusion

    def is_of(self, finished: FinishedRequest) -> bool:
        start = len(finished.prompt)
        return (
            len(self.tokens) == start + len(finished.output)
            and self.namespace == finished.namespace
            and np.array_equal(self.tokens[:start], finished.prompt)
            and np.array_equal(self.tokens[start:], finished.output)
        )


@dataclass(slots=True)
class _Waiting:
    """A request whose ending isn't known yet."""

    finished: FinishedRequest
    until_s: float
    """When it is written nevertheless, on the clock of `time.monotonic`."""
    conclusion: Conclusion | None = None


class _Waited(Enum):
    """What the queue gives after some time without anything."""

    NOTHING = 0


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a recording says of its server."""

    block_size: int
    """Tokens that get one hash."""
    server_block_size: int
    capacity_blocks: int = 0
    """Blocks of the trace that the device holds; 0: unknown."""
    eviction: str = ""
    epoch_s: float = 0.0
    """Seconds since 1970 where the engine's clock is 0."""


class TraceLog:
    """Appends finished requests to a file, on a thread of its own. `record` may be called from any thread."""

    def __init__(
        self,
        path: Path,
        header: TraceHeader,
        salt: bytes | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """Open `path` for appending. Raises StorageError."""
        self.block_size = header.block_size
        self._path = path
        self._salt = secrets.token_bytes(32) if salt is None else salt
        first = {"format": TRACE_FORMAT, "version": TRACE_VERSION, **asdict(header)}
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)
            self._file.write(orjson.dumps(first) + b"\n")
        except OSError as error:
            raise StorageError(f"can't record a trace to {path}: {error}") from error
        self._queue: SimpleQueue[FinishedRequest | _Concluded | None] = SimpleQueue()
        self._thread = start_thread("stemma-trace", self._run, supervisor or LoggingSupervisor())

    def record(self, finished: FinishedRequest) -> None:
        """Queue one finished request. Nothing is recorded once writing has failed."""
        if self._thread.is_alive():
            self._queue.put(finished)

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        """Say who goes on after an answer; `tokens`, its prompt, then itself, mustn't change afterwards."""
        if self._thread.is_alive():
            self._queue.put(_Concluded(namespace, tokens, conclusion))

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
        waiting: deque[_Waiting] = deque()
        is_open = True
        while is_open or waiting:
            item = self._take(waiting) if is_open else _Waited.NOTHING
            if item is None:
                is_open = False
            elif isinstance(item, FinishedRequest):
                waiting.append(_Waiting(item, monotonic() + _PATIENCE_S, _known_conclusion(item)))
            elif isinstance(item, _Concluded):
                _note(waiting, item)
            while waiting and (
                not is_open or waiting[0].conclusion is not None or waiting[0].until_s <= monotonic()
            ):
                written = waiting.popleft()
                try:
                    self._file.write(self._line(written.finished, written.conclusion or NO_CONCLUSION))
                except OSError as error:
                    logger.error("recording to %s stops: %s", self._path, error)
                    return

    def _take(self, waiting: deque[_Waiting]) -> FinishedRequest | _Concluded | _Waited | None:
        """Return what comes next, unless the request that waits longest is due before."""
        try:
            if not waiting:
                return self._queue.get()
            return self._queue.get(timeout=max(0.0, waiting[0].until_s - monotonic()))
        except Empty:
            return _Waited.NOTHING

    def _line(self, finished: FinishedRequest, conclusion: Conclusion) -> bytes:
        namespace = finished.namespace
        seed = self._digest(f"{len(namespace.salt)}:{namespace.salt}:{namespace.adapter}".encode(), b"")
        # The last generated token was never fed back, so it has no KV that a later prompt could reuse.
        tokens = np.concatenate((finished.prompt, finished.output[:-1]))
        line = {
            "timestamp_s": round(finished.timestamp_s, 6),
            "namespace": seed.hex(),
            "session": self._digest(seed, finished.session.encode()).hex() if finished.session else "",
            "input_tokens": len(finished.prompt),
            "output_tokens": len(finished.output),
            "num_cached_tokens": sum(finished.cached_by_tier.values()),
            "cached_by_tier": {str(tier): number for tier, number in finished.cached_by_tier.items()},
            "finish_reason": finished.finish_reason,
            "ending": conclusion.ending.name.lower(),
            "tools": [self._tool_hash(name) for name in conclusion.tools[:_MAX_TOOLS]],
            "roles": "".join(_LETTERS.get(role, "?") for role in finished.roles[:_MAX_ROLES]),
            "queue_wait_s": round(finished.queue_wait_s, 6),
            "first_token_s": None if finished.first_token_s is None else round(finished.first_token_s, 6),
            "service_s": round(finished.service_s, 6),
            "priority": finished.hint.priority,
            "ttl_s": finished.hint.ttl_s,
            "blocks": base64.b64encode(self._hashes(seed, tokens)).decode(),
        }
        return orjson.dumps(line) + b"\n"

    def _tool_hash(self, name: str) -> str:
        """Return the same for one tool of all namespaces; a model may write a name that is no valid text."""
        return self._digest(b"tool:", name.encode(errors="surrogatepass")).hex()

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


def _known_conclusion(finished: FinishedRequest) -> Conclusion | None:
    """Return the conclusion of a request about which nobody will be told more; None: somebody may."""
    is_answered = finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return None if is_answered else NO_CONCLUSION


def _note(waiting: Iterable[_Waiting], concluded: _Concluded) -> None:
    for one in waiting:
        if one.conclusion is None and concluded.is_of(one.finished):
            one.conclusion = concluded.conclusion
            return
