"""Questions of vLLM's scheduler process to the worker process that holds the tiers, over a Unix socket.

The socket lies in a directory that only this user can enter. A message is its length (4 bytes, little-endian)
and its bytes; the first byte says what is asked. An answer that doesn't come in time is a miss.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import stat
import struct
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from stemma.errors import StorageError
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.transfer import TierTransfer
from stemma.prefix.keys import KeySpace
from stemma.supervision import Supervisor, start_thread
from stemma.types import BlockKey, Tier

logger = logging.getLogger(__name__)
KEY_BYTES = 32
MAX_KEYS = 1 << 17
_MAX_MESSAGE = 2048 + KEY_BYTES * MAX_KEYS
_MAX_PROBES = 4096
_SPACE, _FIND, _CLEAR = b"S", b"F", b"C"
_FOUND, _ASK_AGAIN = b"F", b"A"
_TIERS = tuple(Tier)
_LENGTH = struct.Struct("<I")
_FIND_TIMEOUT_S = 1.0
_CLEAR_TIMEOUT_S = 60.0
_MAX_PATH = 100
"""Linux takes 107 bytes."""


class Lookup(Protocol):
    """The questions of the scheduler's side."""

    def find(self, request_id: str, parent: BlockKey, keys: Sequence[BlockKey]) -> tuple[Tier, ...] | None:
        """Return the tiers of the leading keys worth loading; None: ask again, a pool is being asked."""

    def clear(self) -> bool:
        """Drop all blocks of host and disk; return whether that was done."""


class TierLookup(Lookup):
    """Answers from the tiers. Any thread."""

    def __init__(self, transfer: TierTransfer) -> None:
        self._transfer = transfer
        self._probes: OrderedDict[str, Prefetch] = OrderedDict()
        self._lock = threading.Lock()

    @override
    def find(self, request_id: str, parent: BlockKey, keys: Sequence[BlockKey]) -> tuple[Tier, ...] | None:
        if self._transfer.must_probe and keys and not self._is_probed(request_id, parent, keys):
            return None
        return tuple(self._transfer.match(keys))

    def settle(self, request_ids: Sequence[str]) -> None:
        """Stop asking for requests that were admitted or have ended."""
        with self._lock:
            probes = [self._probes.pop(request_id, None) for request_id in request_ids]
        for probe in probes:
            if probe is not None:
                probe.stop()

    @override
    def clear(self) -> bool:
        self._transfer.flush()
        return True

    def _is_probed(self, request_id: str, parent: BlockKey, keys: Sequence[BlockKey]) -> bool:
        with self._lock:
            probe = self._probes.get(request_id)
            oldest = None
            if probe is None:
                probe = self._transfer.prefetch(parent, keys)
                if probe is None:
                    return True
                self._probes[request_id] = probe
                if len(self._probes) > _MAX_PROBES:
                    oldest = self._probes.popitem(last=False)[1]
        if oldest is not None:
            oldest.stop()
        return probe.probe.done()


def socket_path(engine_id: str) -> Path:
    """Return where engine `engine_id` of vLLM answers; make the directory.

    Raises StorageError if it can't be private to this user, or if the path is too long for a socket.
    """
    folder = Path(tempfile.gettempdir()) / f"stemma-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StorageError(f"can't make {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StorageError(f"{folder} must be a directory of yours that nobody else may enter; remove it")
    path = folder / f"{engine_id}.sock"
    if len(os.fsencode(path)) > _MAX_PATH:
        raise StorageError(f"{path} is too long for a socket; set TMPDIR to a shorter directory")
    return path


class LookupServer:
    """Serves a `TierLookup` at a socket, in threads of its own."""

    def __init__(self, path: Path, space: KeySpace, lookup: Lookup, supervisor: Supervisor) -> None:
        path.unlink(missing_ok=True)
        hello = json.dumps(asdict(space)).encode()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                while (message := _receive(self.request)) is not None:
                    _send(self.request, _answer(message, hello, lookup))

        class LookupSocketServer(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """A scheduler that went away, or a message that isn't ours, ends its connection."""
                error = sys.exc_info()[1]
                if error is not None and not isinstance(error, OSError | ValueError):
                    supervisor.on_thread_failure("stemma-lookup", error)

        self._path = path
        self._server = LookupSocketServer(str(path), Handler)
        self._thread = start_thread("stemma-lookup", self._server.serve_forever, supervisor)

    def close(self) -> None:
        """Stop answering new connections."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


class LookupClient(Lookup):
    """Asks a `LookupServer`. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self.num_failed = 0
        """Questions without an answer; each was taken as a miss."""

    def space(self) -> KeySpace:
        """Return the key space of the worker's tiers; raise StorageError if nobody answers."""
        answer = self._ask(_SPACE, _CLEAR_TIMEOUT_S)
        if answer is None:
            raise StorageError(f"vLLM's worker doesn't answer at {self._path}")
        return KeySpace(**json.loads(answer))

    @override
    def find(self, request_id: str, parent: BlockKey, keys: Sequence[BlockKey]) -> tuple[Tier, ...] | None:
        name = request_id.encode()[:1024]
        head = _FIND + struct.pack("<H", len(name)) + name + parent
        answer = self._ask(head + b"".join(keys[:MAX_KEYS]), _FIND_TIMEOUT_S)
        if answer is None:
            self.num_failed += 1
            logger.warning(
                "the worker didn't say what its tiers hold (%d times so far): computed", self.num_failed
            )
            return ()
        if answer[:1] == _ASK_AGAIN:
            return None
        return tuple(_TIERS[code] for code in answer[1:])

    @override
    def clear(self) -> bool:
        return self._ask(_CLEAR, _CLEAR_TIMEOUT_S) == b"\x01"

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, message: bytes, timeout_s: float) -> bytes | None:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.settimeout(timeout_s)
                self._socket.connect(str(self._path))
            self._socket.settimeout(timeout_s)
            _send(self._socket, message)
            answer = _receive(self._socket)
        except (OSError, ValueError):
            answer = None
        if answer is None:  # a late answer must not be taken for that of the next question
            self.close()
        return answer


def _answer(message: bytes, hello: bytes, lookup: Lookup) -> bytes:
    """Return the answer; raise ValueError for a message that isn't ours."""
    kind, rest = message[:1], message[1:]
    if kind == _SPACE:
        return hello
    if kind == _CLEAR:
        return bytes([lookup.clear()])
    if kind != _FIND or len(rest) < 2:
        raise ValueError("not a question")
    end = 2 + int.from_bytes(rest[:2], "little")
    name, digests = rest[2:end].decode(), rest[end:]
    if not digests or len(digests) % KEY_BYTES:
        raise ValueError("not keys")
    parent, *keys = [BlockKey(digests[at : at + KEY_BYTES]) for at in range(0, len(digests), KEY_BYTES)]
    try:
        found = lookup.find(name, parent, keys)
    except StorageError:  # the tiers are closed
        found = ()
    return _ASK_AGAIN if found is None else _FOUND + bytes(_TIERS.index(tier) for tier in found)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes | None:
    """Return a message, or None at its end; raise ValueError if it is too long."""
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_MESSAGE:
        raise ValueError("message too long")
    return _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 16))
        if not part:
            return None
        data += part
    return bytes(data)
