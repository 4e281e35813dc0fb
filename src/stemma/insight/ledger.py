"""The usage ledger: hit and miss tokens of every finished request, kept in a database.

`Ledger.record` returns a future that is done once the row is committed; the server waits for it before it
sends the last bytes of a response. So a request whose answer a client has seen whole is in the ledger, also
if the process is killed right after. Rows of requests that finish together share a transaction. Neither the
step loop nor the event loop ever waits for the database.

SQLite is the default; any URL that SQLAlchemy knows works, e.g. ``postgresql+psycopg://host/db``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from stemma.errors import ConfigError, StorageError
from stemma.insight.usage_record import UsageRecord
from stemma.supervision import Supervisor, start_thread
from stemma.types import Tier

_log = logging.getLogger(__name__)

MAX_BATCH = 512
MAX_WAITING = 100_000
"""Maximum rows held while the database doesn't answer; further ones are refused and counted."""
RETRY_S = 1.0

_METADATA = sa.MetaData()
_USAGE = sa.Table(
    "usage",
    _METADATA,
    sa.Column("request_id", sa.String(128), primary_key=True),
    sa.Column("finished_at", sa.Float, nullable=False, index=True),
    sa.Column("day", sa.String(10), nullable=False),
    sa.Column("tenant", sa.String(256), nullable=False),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("api", sa.String(32), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    *(sa.Column(f"hit_{tier.value}_tokens", sa.BigInteger, nullable=False) for tier in Tier),
    sa.Column("miss_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_tokens", sa.BigInteger, nullable=False),
)

By = Literal["tenant", "day", "model"]


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Sums over the requests of one group."""

    group: str
    model: str
    num_requests: int
    hit_tokens: Mapping[Tier, int]
    miss_tokens: int
    output_tokens: int

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that came from any tier."""
        return sum(self.hit_tokens.values())


def ledger_url(given: str) -> str:
    """Return the URL of a ledger given as a file or as a URL."""
    return given if "://" in given else sqlite_url(Path(given))


def check_ledger(given: str) -> None:
    """Open a ledger and close it again. Raises ConfigError, StorageError: before a model is loaded."""
    _open(ledger_url(given)).dispose()


def sqlite_url(path: Path) -> str:
    """Return the URL of a SQLite file."""
    return f"sqlite:///{path}"


class Ledger:
    """Writes finished requests into a database, on a thread of its own. Thread-safe."""

    def __init__(self, url: str, supervisor: Supervisor) -> None:
        """Open the database and create the table if need be. Raises ConfigError, StorageError."""
        self._engine = _open(url)
        self._queue: queue.Queue[tuple[UsageRecord, Future[bool]] | None] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self.num_accepted = 0
        self.num_written = 0
        self.num_refused = 0
        self._thread = start_thread("stemma-ledger", self._write_all, supervisor)

    def record(self, record: UsageRecord) -> Future[bool]:
        """Write `record` soon. The future is True once the row is committed, False if it was refused."""
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()
        try:
            self._queue.put_nowait((record, future))
            self.num_accepted += 1
        except queue.Full:
            self.num_refused += 1
            future.set_result(False)
        return future

    @property
    def num_waiting(self) -> int:
        """Rows that are taken and not written yet."""
        return max(0, self.num_accepted - self.num_written)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is waiting and stop; rows that can't be written by then are logged as lost."""
        self._closing.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)
        self._engine.dispose()

    def _write_all(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            batch, ended = [item], False
            while len(batch) < MAX_BATCH and not ended:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    ended = True
                else:
                    batch.append(more)
            self._write(batch)
            if ended:
                return

    def _write(self, batch: Sequence[tuple[UsageRecord, Future[bool]]]) -> None:
        """Commit the rows, however long the database takes, unless the ledger is closed meanwhile."""
        rows = [_row(record) for record, _ in batch]
        while True:
            try:
                self._commit(rows)
                break
            except SQLAlchemyError as error:
                _log.warning("the usage ledger can't be written, %d rows wait: %s", len(rows), error)
                if self._closing.wait(RETRY_S):
                    _log.error("%d rows of the usage ledger are lost", len(rows))
                    self.num_refused += len(rows)
                    self.num_accepted -= len(rows)
                    for _, future in batch:
                        future.set_result(False)
                    return
        self.num_written += len(rows)
        for _, future in batch:
            future.set_result(True)

    def _commit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            with self._engine.begin() as connection:
                connection.execute(_USAGE.insert(), rows)
        except IntegrityError:
            # The answer to a commit may have been lost: rows that exist already stay unchanged.
            for row in rows:
                try:
                    with self._engine.begin() as connection:
                        connection.execute(_USAGE.insert(), row)
                except IntegrityError:
                    continue


def usage(url: str, by: By, since: float = 0.0, until: float | None = None) -> list[UsageRow]:
    """Return sums by group and model, finished in [since, until) seconds since the epoch, in order of group.

    Raises ConfigError for a URL that can't be opened and StorageError for a database that can't be read.
    """
    group = _USAGE.c[by]
    hits = [_USAGE.c[f"hit_{tier.value}_tokens"] for tier in Tier]
    sums = [sa.func.sum(column) for column in (*hits, _USAGE.c.miss_tokens, _USAGE.c.output_tokens)]
    query = sa.select(group, _USAGE.c.model, sa.func.count(), *sums).where(_USAGE.c.finished_at >= since)
    if until is not None:
        query = query.where(_USAGE.c.finished_at < until)
    query = query.group_by(group, _USAGE.c.model).order_by(group, _USAGE.c.model)
    engine = _open(url)
    try:
        with engine.connect() as connection:
            found = connection.execute(query).all()
    except SQLAlchemyError as error:
        raise StorageError(f"the usage ledger can't be read: {error}") from error
    finally:
        engine.dispose()
    return [
        UsageRow(
            group=str(row[0]),
            model=str(row[1]),
            num_requests=int(row[2]),
            hit_tokens=dict(zip(Tier, map(int, row[3:-2]), strict=True)),
            miss_tokens=int(row[-2]),
            output_tokens=int(row[-1]),
        )
        for row in found
    ]


def drop_older(url: str, before: float) -> int:
    """Drop the rows of requests that finished before a time; return how many. Errors as `usage`."""
    engine = _open(url)
    try:
        with engine.begin() as connection:
            return connection.execute(sa.delete(_USAGE).where(_USAGE.c.finished_at < before)).rowcount
    except SQLAlchemyError as error:
        raise StorageError(f"the usage ledger can't be written: {error}") from error
    finally:
        engine.dispose()


def _row(record: UsageRecord) -> dict[str, Any]:
    day = datetime.fromtimestamp(record.finished_at, UTC).date().isoformat()
    return {
        "request_id": record.request_id,
        "finished_at": record.finished_at,
        "day": day,
        "tenant": record.tenant,
        "model": record.model,
        "api": record.api,
        "outcome": record.outcome,
        **{f"hit_{tier.value}_tokens": record.hit_tokens.get(tier, 0) for tier in Tier},
        "miss_tokens": record.miss_tokens,
        "output_tokens": record.output_tokens,
    }


def _open(url: str) -> sa.Engine:
    try:
        engine = sa.create_engine(url, pool_pre_ping=True)
    except (SQLAlchemyError, ImportError) as error:
        raise ConfigError(f"the usage ledger {_without_password(url)!r} can't be opened: {error}") from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _make_durable)
    try:
        _METADATA.create_all(engine)
    except SQLAlchemyError as error:
        engine.dispose()
        raise StorageError(f"the usage ledger {_without_password(url)!r} can't be opened: {error}") from error
    return engine


def _without_password(url: str) -> str:
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "(not a URL)"


def _make_durable(connection: Any, _record: Any) -> None:
    """Readers don't block the writer, and a commit is on disk before it returns."""
    cursor = connection.cursor()
    for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA busy_timeout=5000"):
        cursor.execute(statement)
    cursor.close()


def total(rows: Iterable[UsageRow]) -> UsageRow:
    """Return the sum of `rows`."""
    rows = list(rows)
    return UsageRow(
        group="total",
        model="",
        num_requests=sum(row.num_requests for row in rows),
        hit_tokens={tier: sum(row.hit_tokens.get(tier, 0) for row in rows) for tier in Tier},
        miss_tokens=sum(row.miss_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
    )
