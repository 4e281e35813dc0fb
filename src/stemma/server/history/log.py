"""The answers on disk: one file that grows at its end, so that a restart finds what was written before it.

::

    answers     a line that names the format, then records: checksum (xxh3, 8 bytes), length of the body
                (4 bytes), body: scope, key, characters before, sizes, tail, ids before, ids

It lies beside the disk tier's blocks, in a directory that this server has locked. Nothing is synced, and no
byte is believed: reading ends at the first record that is not whole and sound, and the file is cut there. A
file that outgrows its limit is written anew from what is in memory.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import xxhash

from stemma.errors import StorageError
from stemma.server.history.answers import CONTEXT_TOKENS, TAIL_CHARS, Place, WrittenAnswer, WrittenAnswers
from stemma.supervision import Supervisor, start_thread
from stemma.types import TokenArray, as_tokens

logger = logging.getLogger(__name__)

FILE_NAME = "answers"
HEADER = b"stemma-answers 1\n"
_FRAME = struct.Struct("<QI")
_FIXED = struct.Struct("<32s32sIHHI")
MAX_IDS = 1 << 20
_REWRITE_WITHIN_S = 30.0
_MAX_TAIL_BYTES = 4 * TAIL_CHARS


class AnswerLog:
    """The file of one server, written on a thread of its own."""

    def __init__(
        self, path: Path, written: WrittenAnswers, max_bytes: int, vocab_size: int, supervisor: Supervisor
    ) -> None:
        """Read `path` into `written`, and write there from now on what that keeps. Raises StorageError.

        `max_bytes` limits the file. Answers with ids of `vocab_size` or more are no answers.
        """
        self._path = path
        self._written = written
        self._max_bytes = max_bytes
        self._vocab_size = vocab_size
        self._queue: SimpleQueue[WrittenAnswer | threading.Event | None] = SimpleQueue()
        """Answers to append; events to set once the file holds what is in memory, no more."""
        self._fd = -1
        self._size = 0
        self.num_read = 0
        """Answers found at the start."""
        self.failure: str | None = None
        """Why nothing is written any more."""
        try:
            self._fd = _opened(path)
            self._restore()
        except OSError as error:
            self._close_file()
            raise StorageError(f"can't use {path}: {error.strerror}") from error
        written.on_kept = self._queue.put
        self._thread = start_thread("stemma-answers", self._run, supervisor)

    def rewrite(self) -> None:
        """Drop from the file what is no longer in memory, and wait for it. Raises StorageError."""
        if not self._thread.is_alive():
            return
        done = threading.Event()
        self._queue.put(done)
        if not done.wait(_REWRITE_WITHIN_S) or self.failure is not None:
            raise StorageError(f"{self._path} still holds answers: {self.failure or 'the disk is too slow'}")

    def close(self) -> None:
        """Write what is queued and close the file; a second call does nothing."""
        self._written.on_kept = lambda answer: None
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._close_file()

    def _restore(self) -> None:
        data = _read(self._fd, self._max_bytes)
        end = len(HEADER) if data.startswith(HEADER) else 0
        if end:
            view = memoryview(data)
            while (found := _record(view, end)) is not None:
                body, end = found
                if (answer := _answer(body, self._vocab_size)) is not None:
                    self._written.keep(answer)
                    self.num_read += 1
        os.ftruncate(self._fd, end)
        if not end:
            os.pwrite(self._fd, HEADER, 0)
        self._size = max(end, len(HEADER))

    def _run(self) -> None:
        """Write until told to stop. A full disk ends the writing, never the server."""
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    self._rewrite()
                    self.failure = None
                elif self.failure is None:
                    self._append(item)
            except OSError as error:
                self.failure = error.strerror or repr(error)
                logger.error("answers are no longer written to %s: %s", self._path, self.failure)
            if isinstance(item, threading.Event):
                item.set()

    def _append(self, answer: WrittenAnswer) -> None:
        record = _bytes_of(answer)
        if self._size + len(record) > self._max_bytes:
            self._rewrite()  # holds this answer as well, unless it was evicted meanwhile
            return
        _write(self._fd, record, self._size)
        self._size += len(record)

    def _rewrite(self) -> None:
        """Replace the file by one of what is in memory, newest last, half of the limit at most."""
        records: list[bytes] = []
        room = self._max_bytes // 2 - len(HEADER)
        for answer in reversed(self._written.answers()):
            record = _bytes_of(answer)
            room -= len(record)
            if room < 0:
                break
            records.append(record)
        draft = self._path.with_name(f"{FILE_NAME}.new")
        draft.unlink(missing_ok=True)
        fd = _opened(draft)
        try:
            content = HEADER + b"".join(reversed(records))
            _write(fd, content, 0)
            draft.replace(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._size = fd, len(content)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _opened(path: Path) -> int:
    """Open or create a plain file for this user alone. Raises OSError for anything else of that name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "it is no plain file")
    return fd


def _read(fd: int, most: int) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < most and (part := os.pread(fd, min(most - at, 1 << 24), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _bytes_of(answer: WrittenAnswer) -> bytes:
    place = answer.place
    tail = place.tail.encode("utf-8", "surrogatepass")
    sizes = (place.num_chars, len(tail), len(answer.context), len(answer.token_ids))
    body = (
        _FIXED.pack(place.scope, place.key, *sizes)
        + tail
        + answer.context.astype("<i4").tobytes()
        + answer.token_ids.astype("<i4").tobytes()
    )
    return _FRAME.pack(xxhash.xxh3_64_intdigest(body), len(body)) + body


def _record(data: memoryview, begin: int) -> tuple[memoryview, int] | None:
    """Return the body of the record at `begin` and its end; None if it isn't whole and sound."""
    if len(data) - begin < _FRAME.size:
        return None
    checksum, length = _FRAME.unpack_from(data, begin)
    body = data[begin + _FRAME.size : begin + _FRAME.size + length]
    if len(body) < length or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    return body, begin + _FRAME.size + length


def _answer(body: memoryview, vocab_size: int) -> WrittenAnswer | None:
    """Return the answer in a record; None if the bytes, though sound, are of none."""
    if len(body) < _FIXED.size:
        return None
    scope, key, num_chars, num_tail, num_context, num_ids = _FIXED.unpack_from(body)
    is_sized = num_tail <= _MAX_TAIL_BYTES and num_context <= CONTEXT_TOKENS and 0 < num_ids <= MAX_IDS
    if not is_sized or len(body) != _FIXED.size + num_tail + 4 * (num_context + num_ids):
        return None
    rest = body[_FIXED.size + num_tail :]
    ids = np.frombuffer(rest, dtype="<i4")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return None
    try:
        tail = bytes(body[_FIXED.size : _FIXED.size + num_tail]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    place = Place(scope, key, num_chars, tail)
    return WrittenAnswer(place, _own(ids[:num_context]), _own(ids[num_context:]))


def _own(ids: TokenArray) -> TokenArray:
    return as_tokens(ids).copy()
