"""Files and batches on disk: one directory of one server.

::

    lock            held by the server that uses the directory
    batches.db      SQLite: facts of files and batches, the lines of open batches, and their results
                    and the rows that can't be read, which are set aside
    files/ID        the bytes of a file; one without a row is what a crash left, and goes at the next start

A result is committed before it counts, and a batch's files and its end are one transaction: after `kill -9`
a batch goes on behind the last result, and nothing is answered twice but what was running.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stemma.budgets import Budget
from stemma.errors import NotFound, StorageError
from stemma_batch.lines import BatchLine
from stemma_batch.records import ENDED, Batch, StoredFile

logger = logging.getLogger(__name__)
DATABASE = "batches.db"
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT, filename TEXT, purpose TEXT, bytes INTEGER, created INTEGER,
    expires INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT, created INTEGER, is_open INTEGER, content BLOB);
CREATE TABLE IF NOT EXISTS unreadable (
    id TEXT PRIMARY KEY, owner TEXT, content BLOB, why TEXT);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT, number INTEGER, custom_id TEXT, offset INTEGER, bytes INTEGER, key BLOB,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results (
    batch TEXT, number INTEGER, is_failed INTEGER, record BLOB,
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
"""
_FILES = "SELECT id, owner, filename, purpose, bytes, created, expires FROM files"
_RETRY_LATER_S = 3600.0
FILE_BYTES = 65_536
"""Disk space that a file takes beside its bytes: small ones are bounded in number too."""
BATCH_BYTES = 65_536
"""That of a batch: what is known of it, and why it failed."""
_HELD = f"""
SELECT owner, SUM(held) FROM (
    SELECT owner, bytes + {FILE_BYTES} AS held FROM files
    UNION ALL SELECT owner, {BATCH_BYTES} FROM batches
    UNION ALL SELECT batches.owner, LENGTH(record) + 1 FROM results JOIN batches ON batches.id = batch)
GROUP BY owner
"""


class BatchStore:
    """The directory of one server. For one thread at a time."""

    def __init__(self, directory: Path, budget: Budget) -> None:
        """`budget`: bytes of the files that clients send, and of the results.

        Raises StorageError, also if another server uses the directory.
        """
        self.budget = budget
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.files = directory / "files"
            self.files.mkdir(exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"another server keeps its batches in {directory}; give each its own"
            ) from error
        except OSError as error:
            raise StorageError(f"can't keep batches in {directory}: {error.strerror}") from error
        try:
            self._db = sqlite3.connect(directory / DATABASE, check_same_thread=False, isolation_level=None)
            self._db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; {_TABLES}")
            self._drop_strays()
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock)
            raise StorageError(f"can't read the batches in {directory}: {error}") from error

    def close(self) -> None:
        """Close the database and let another server take the directory."""
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _drop_strays(self) -> None:
        self.budget.measured(dict(self._db.execute(_HELD).fetchall()))
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in self.files.iterdir():
            if path.name not in known:
                path.unlink()

    # Files

    def add_file(self, file: StoredFile) -> None:
        """Enter a file whose bytes lie at `path_of`. Raises RateLimited or Overloaded if too much is kept."""
        with self._taken(file.num_bytes + FILE_BYTES, file.owner):
            self._insert_file(file)

    @contextmanager
    def _taken(self, num_bytes: int, owner: str) -> Iterator[None]:
        """Take disk space for what is written meanwhile. Raises RateLimited or Overloaded."""
        self.budget.take(num_bytes, owner, retry_after_s=_RETRY_LATER_S)
        try:
            yield
        except BaseException:
            self.budget.give_back(num_bytes, owner)
            raise

    def _insert_file(self, file: StoredFile) -> None:
        self._db.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                file.file_id,
                file.owner,
                file.filename,
                file.purpose,
                file.num_bytes,
                file.created_at,
                file.expires_at,
            ),
        )

    def path_of(self, file_id: str) -> Path:
        """Return where the bytes of a file lie. Ids are made by this server, never a client's text."""
        return self.files / file_id

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Return a file of `owner`. Raises NotFound."""
        found = self._db.execute(f"{_FILES} WHERE id = ? AND owner = ?", (file_id, owner))
        row = found.fetchone()
        if row is None:
            raise NotFound("there is no such file")
        return StoredFile(*row)

    def list_files(self, owner: str, purpose: str | None) -> list[StoredFile]:
        """Return the files of `owner`, oldest first."""
        rows = self._db.execute(
            f"{_FILES} WHERE owner = ?1 AND (?2 IS NULL OR purpose = ?2) ORDER BY rowid",
            (owner, purpose),
        )
        return [StoredFile(*row) for row in rows]

    def delete_file(self, owner: str, file_id: str) -> None:
        """Drop a file. An open batch that reads it fails. Raises NotFound."""
        self._drop_file(self.file(owner, file_id))

    def drop_expired(self, now: float) -> None:
        """Drop the files whose time is over, and batches that have ended and have none left."""
        for row in self._db.execute(f"{_FILES} WHERE expires <= ?", (now,)).fetchall():
            self._drop_file(StoredFile(*row))
        for batch in self._batches("is_open = 0"):
            ids = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            if not any(self._has_file(one) for one in ids if one is not None):
                self._db.execute("DELETE FROM batches WHERE id = ?", (batch.batch_id,))
                self.budget.give_back(BATCH_BYTES, batch.owner)

    def _has_file(self, file_id: str) -> bool:
        return self._db.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone() is not None

    def _drop_file(self, file: StoredFile) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (file.file_id,))
        self.path_of(file.file_id).unlink(missing_ok=True)
        self.budget.give_back(file.num_bytes + FILE_BYTES, file.owner)

    # Batches

    def add_batch(self, batch: Batch) -> None:
        """Enter a new batch. Raises RateLimited or Overloaded if too much is kept."""
        with self._taken(BATCH_BYTES, batch.owner):
            self.save(batch)

    def save(self, batch: Batch) -> None:
        """Enter a batch, or what has become of it."""
        self._db.execute(
            "INSERT INTO batches VALUES (?1, ?2, ?3, ?4, ?5) "
            "ON CONFLICT (id) DO UPDATE SET is_open = ?4, content = ?5",
            (batch.batch_id, batch.owner, batch.created_at, batch.status not in ENDED, batch.packed()),
        )

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch of `owner`. Raises NotFound."""
        found = self._batches("id = ? AND owner = ?", batch_id, owner)
        if not found:
            raise NotFound("there is no such batch")
        return found[0]

    def list_batches(self, owner: str) -> list[Batch]:
        """Return the batches of `owner`, oldest first."""
        return self._batches("owner = ?", owner)

    def open_batches(self) -> list[Batch]:
        """Return those that haven't ended, oldest first."""
        return self._batches("is_open = 1")

    def _batches(self, where: str, *values: str) -> list[Batch]:
        """Return the batches that a condition finds, oldest first; rows that can't be read are set aside."""
        rows = self._db.execute(f"SELECT id, content FROM batches WHERE {where} ORDER BY rowid", values)
        found: list[Batch] = []
        for batch_id, content in rows.fetchall():
            try:
                found.append(Batch.unpacked(content))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._set_aside(batch_id, f"{type(error).__name__}: {error}")
        return found

    def _set_aside(self, batch_id: str, why: str) -> None:
        """Keep a row where nobody reads it; its lines and results stay too, for whoever mends it."""
        logger.error("batch %s can't be read and is set aside: %s", batch_id, why)
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO unreadable SELECT id, owner, content, ? FROM batches WHERE id = ?",
                (why, batch_id),
            )
            self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def counts(self) -> dict[str, int]:
        """Return how many files, batches and unreadable rows there are, and the bytes of the files."""
        tables = {name: f"SELECT COUNT(*) FROM {name}" for name in ("files", "batches", "unreadable")}
        tables["bytes"] = "SELECT COALESCE(SUM(bytes), 0) FROM files"
        return {name: int(self._db.execute(asked).fetchone()[0]) for name, asked in tables.items()}

    def drop_older(self, before: float) -> int:
        """Drop the files made before a time, the batches that have none left, and unreadable rows.

        Returns how many files.
        """
        rows = self._db.execute(f"{_FILES} WHERE created < ?", (before,)).fetchall()
        for row in rows:
            self._drop_file(StoredFile(*row))
        for table in ("lines", "results"):
            self._db.execute(f"DELETE FROM {table} WHERE batch IN (SELECT id FROM unreadable)")
        self._db.execute("DELETE FROM unreadable")
        self.drop_expired(before)
        return len(rows)

    # Lines and results

    def drop_lines(self, batch: Batch) -> None:
        """Forget the lines of a batch."""
        self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.batch_id,))

    def put_lines(self, batch: Batch, lines: Iterable[BatchLine]) -> str | None:
        """Add lines to a batch; return a `custom_id` that came twice, and then keep none of these."""
        one: BatchLine | None = None
        try:
            with self._transaction():
                for one in lines:
                    self._db.execute(
                        "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)",
                        (batch.batch_id, one.number, one.custom_id, one.offset, one.num_bytes, one.key),
                    )
        except sqlite3.IntegrityError:
            assert one is not None
            return one.custom_id
        return None

    def open_lines(self, batch: Batch) -> array[int]:
        """Return the numbers of the lines without a result, depth first over the tree of their prompts."""
        rows = self._db.execute(
            "SELECT number FROM lines WHERE batch = ?1 "
            "AND number NOT IN (SELECT number FROM results WHERE batch = ?1) ORDER BY key, number",
            (batch.batch_id,),
        )
        return array("q", (row[0] for row in rows))

    def line(self, batch: Batch, number: int) -> tuple[str, bytes]:
        """Return a line's own id and its bytes. Raises NotFound if the file was deleted."""
        custom_id, offset, num_bytes = self._db.execute(
            "SELECT custom_id, offset, bytes FROM lines WHERE batch = ? AND number = ?",
            (batch.batch_id, number),
        ).fetchone()
        try:
            with self.path_of(batch.input_file_id).open("rb") as file:
                file.seek(offset)
                return custom_id, file.read(num_bytes)
        except FileNotFoundError as error:
            raise NotFound("the batch's input file was deleted") from error

    def take_room(self, record: bytes, owner: str) -> None:
        """Take disk space for a result. Raises RateLimited or Overloaded."""
        self.budget.take(len(record) + 1, owner, retry_after_s=_RETRY_LATER_S)

    def put_result(self, batch: Batch, number: int, record: bytes, *, is_failed: bool) -> None:
        """Commit the record of a line, whose room was taken, together with what the batch counts."""
        try:
            with self._transaction():
                self._db.execute(
                    "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)",
                    (batch.batch_id, number, is_failed, record),
                )
                self.save(batch)
        except BaseException:
            self.budget.give_back(len(record) + 1, batch.owner)
            raise

    def put_expired(self, batch: Batch, record: Callable[[str], bytes]) -> None:
        """Commit a failed result for each line without one, and the batch. `record` gets a line's own id."""
        numbers, num_bytes = self.open_lines(batch), 0
        with self._transaction():
            for number in numbers:
                (custom_id,) = self._db.execute(
                    "SELECT custom_id FROM lines WHERE batch = ? AND number = ?", (batch.batch_id, number)
                ).fetchone()
                told = record(custom_id)
                num_bytes += len(told) + 1
                self._db.execute("INSERT INTO results VALUES (?, ?, 1, ?)", (batch.batch_id, number, told))
            self.save(batch)
        self.budget.add(num_bytes, batch.owner)  # no more than a few times what its file takes

    def put_files(self, batch: Batch, ended: Batch, files: Iterable[tuple[StoredFile, bool]]) -> Batch:
        """End a batch: write the records into files, in the order of lines; return it as it is saved.

        `files`: each with whether it gets the failed ones; one that gets none isn't made.
        """
        made: dict[bool, StoredFile] = {}
        for file, is_failed in files:
            num_bytes = self._write_records(batch, self.path_of(file.file_id), is_failed=is_failed)
            if num_bytes:
                made[is_failed] = replace(file, num_bytes=num_bytes)
        ended = _with_files(ended, made)
        with self._transaction():
            for file in made.values():
                self._insert_file(file)
            for table in ("lines", "results"):
                self._db.execute(f"DELETE FROM {table} WHERE batch = ?", (batch.batch_id,))
            self.save(ended)
        self.budget.add(FILE_BYTES * len(made), batch.owner)  # their bytes were the results'
        return ended

    def _write_records(self, batch: Batch, path: Path, *, is_failed: bool) -> int:
        rows = self._db.execute(
            "SELECT record FROM results WHERE batch = ? AND is_failed = ? ORDER BY number",
            (batch.batch_id, is_failed),
        )
        num_bytes = 0
        with path.open("wb") as file:
            for (record,) in rows:
                num_bytes += file.write(record + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not num_bytes:
            path.unlink()
        return num_bytes


def _with_files(batch: Batch, made: dict[bool, StoredFile]) -> Batch:
    ids = {is_failed: file.file_id for is_failed, file in made.items()}
    return replace(batch, output_file_id=ids.get(False), error_file_id=ids.get(True))
