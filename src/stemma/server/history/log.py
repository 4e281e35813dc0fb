"""The answers on disk: one file that grows at its end, so that a restart finds what was written before it.

::

    answers     a line that names the format, then records: checksum (xxh3, 8 bytes), length of the body
                (4 bytes), body: time of the last use, scope, key, characters before, sizes, tail, ids before,
                ids. Format 1 had no times; those of its file's last change stand for them.

It lies beside the disk tier's blocks, in a directory that this server has locked, and keeps answers as long
as that tier keeps blocks. Nothing is synced, and no byte is believed: reading ends at the first record that
is not whole and sound, and the file is cut there. A file that outgrows its limit, lost a record to a full
disk, or holds what has expired, is written anew from what is in memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Full, Queue

import numpy as np
import xxhash

from stemma.errors import StorageError
from stemma.server.history.answers import CONTEXT_TOKENS, TAIL_CHARS, Place, WrittenAnswer, WrittenAnswers
from stemma.supervision import Supervisor, start_thread
from stemma.types import TokenArray, as_tokens

logger = logging.getLogger(__name__)

FILE_NAME = "answers"
HEADER = b"stemma-answers 2\n"
_HEADER_1 = b"stemma-answers 1\n"
_FRAME = struct.Struct("<QI")
_USED_AT = struct.Struct("<d")
_FIXED = struct.Struct("<32s32sIHHI")
MAX_IDS = 1 << 20
MAX_QUEUED = 256
"""Answers that wait to be appended; a disk slower than that is written to from memory later."""
RETRY_S = 30.0
"""After a failure; also how often expired answers are looked for."""
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
        self._queue: Queue[WrittenAnswer | threading.Event | None] = Queue(MAX_QUEUED)
        """Answers to append; events to set once the file holds what is in memory, no more."""
        self._is_behind = False
        """Whether the file lacks something that is in memory, or holds what isn't."""
        self._retry_at = 0.0
        self._fd = -1
        self._size = 0
        self.num_read = 0
        """Answers found at the start."""
        self.failure: str | None = None
        """Why the last write failed; it is tried again."""
        try:
            self._fd = _opened(path)
            self._restore()
        except (OSError, ValueError) as error:
            self._close_file()
            raise StorageError(f"can't use {path}: {getattr(error, 'strerror', None) or error}") from error
        written.on_kept = self._kept
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

    def _kept(self, answer: WrittenAnswer) -> None:
        try:
            self._queue.put_nowait(answer)
        except Full:
            self._is_behind = True

    def _restore(self) -> None:
        end = 0
        for answer, used_at, end in records_in(self._fd, self._vocab_size):  # noqa: B007 - the last end counts
            if answer is not None:
                self._written.keep(answer, used_at)
                self.num_read += 1
        is_new = os.pread(self._fd, len(HEADER), 0) == HEADER
        self._size = max(end, len(HEADER)) if is_new else 0
        os.ftruncate(self._fd, self._size)
        if not is_new or self._written.expire() or self._size > self._max_bytes:
            self._rewrite()

    def _run(self) -> None:
        """Write until told to stop. A full disk holds up the writing, never the server."""
        item: WrittenAnswer | threading.Event | str | None = ""
        while item is not None:
            item = self._next()
            try:
                self._write_down(item)
            except OSError as error:
                self._note(error)
            if isinstance(item, threading.Event):
                item.set()

    def _write_down(self, item: WrittenAnswer | threading.Event | str | None) -> None:
        """Append an answer; write the whole file anew if that is asked for, or something is missing there."""
        is_due = item is None or time.monotonic() >= self._retry_at
        if isinstance(item, threading.Event) or (self._is_behind and is_due):
            self._rewrite()
        elif isinstance(item, WrittenAnswer) and not self._is_behind:
            self._append(item)

    def _note(self, error: OSError) -> None:
        text = error.strerror or repr(error)
        if self.failure is None:
            logger.error("answers can't be written to %s: %s; it is tried again", self._path, text)
        self.failure = text
        self._is_behind, self._retry_at = True, time.monotonic() + RETRY_S

    def _next(self) -> WrittenAnswer | threading.Event | str | None:
        """Return what to do next; a word if there was nothing for a while."""
        try:
            return self._queue.get(timeout=RETRY_S)
        except Empty:
            self._is_behind |= self._written.expire() > 0
            return "look around"

    def _append(self, answer: WrittenAnswer) -> None:
        record = _bytes_of(answer, time.time())
        if self._size + len(record) > self._max_bytes:
            self._rewrite()  # holds this answer as well, unless it was evicted meanwhile
            return
        _write(self._fd, record, self._size)
        self._size += len(record)

    def _rewrite(self) -> None:
        """Replace the file by one of what is in memory, newest last, half of the limit at most."""
        records: list[bytes] = []
        room = self._max_bytes // 2 - len(HEADER)
        self._is_behind = False
        for answer, used_at in reversed(self._written.answers()):
            record = _bytes_of(answer, used_at)
            room -= len(record)
            if room < 0:
                break
            records.append(record)
        fd, size = _replaced(self._path, records[::-1])
        os.close(self._fd)
        self._fd, self._size, self.failure = fd, size, None

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


def records_in(fd: int, vocab_size: int) -> Iterator[tuple[WrittenAnswer | None, float, int]]:
    """Yield the sound records of a file: the answer (None: it is of none), its last use, the record's end."""
    found = os.fstat(fd)
    header = os.pread(fd, len(HEADER), 0)
    if header not in (HEADER, _HEADER_1):
        return
    with mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        end = len(HEADER)
        try:
            while (record := _record(view, end)) is not None:
                body, end = record
                used_at = found.st_mtime
                if header == HEADER and len(body) >= _USED_AT.size:
                    (used_at,) = _USED_AT.unpack_from(body)
                    body = body[_USED_AT.size :]
                answer = _answer(body, vocab_size)
                del body, record  # the mapping can't be closed while something points into it
                yield answer, min(used_at, time.time()), end
        finally:
            view.release()


def drop_unused(path: Path, seconds: float) -> int:
    """Drop from a file that no server has open what wasn't used for so long; return how many answers.

    Raises StorageError.
    """
    if not path.exists():
        return 0
    try:
        fd = _opened(path)
        try:
            found = [(one, used_at) for one, used_at, _ in records_in(fd, 1 << 31) if one is not None]
        finally:
            os.close(fd)
        left = [(answer, used_at) for answer, used_at in found if used_at >= time.time() - seconds]
        if len(left) < len(found):
            os.close(_replaced(path, [_bytes_of(answer, used_at) for answer, used_at in left])[0])
    except (OSError, ValueError) as error:
        raise StorageError(f"can't use {path}: {getattr(error, 'strerror', None) or error}") from error
    return len(found) - len(left)


def count_answers(path: Path) -> int:
    """Return how many answers a file has; 0 if it can't be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        return sum(answer is not None for answer, _, _ in records_in(fd, 1 << 31))
    except (OSError, ValueError):
        return 0
    finally:
        os.close(fd)


def _replaced(path: Path, records: list[bytes]) -> tuple[int, int]:
    """Replace a file by one of these records; return its descriptor and size. Raises OSError."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    fd = _opened(draft)
    try:
        content = HEADER + b"".join(records)
        _write(fd, content, 0)
        draft.replace(path)
    except OSError:
        os.close(fd)
        raise
    return fd, len(content)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _bytes_of(answer: WrittenAnswer, used_at: float) -> bytes:
    place = answer.place
    tail = place.tail.encode("utf-8", "surrogatepass")
    sizes = (place.num_chars, len(tail), len(answer.context), len(answer.token_ids))
    body = (
        _USED_AT.pack(used_at)
        + _FIXED.pack(place.scope, place.key, *sizes)
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
