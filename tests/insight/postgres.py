"""A PostgreSQL server of its own for tests: a new folder, a Unix socket, no TCP port."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path

import sqlalchemy as sa

START_S = 30.0


def _program(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))  # where Debian keeps them
    return shutil.which(name) or (str(found[-1]) if found else None)


def _user() -> str | None:
    """The user to run as, since the server refuses to run as root; None: the present one."""
    return "nobody" if os.geteuid() == 0 else None


def missing_for_postgres() -> str | None:
    """What is missing, as a reason to skip; None: nothing."""
    if importlib.util.find_spec("psycopg") is None:
        return "needs psycopg (pip install 'stemma-llm[postgres]')"
    if _program("initdb") is None or _program("postgres") is None:
        return "needs PostgreSQL (Debian: apt-get install postgresql)"
    return None


class Postgres:
    """Started on entry, stopped by its own pid on exit."""

    def __init__(self) -> None:
        # A socket's path may have 107 bytes, less than pytest's folders. In memory: a new server syncs a
        # thousand files; what a test kills is processes, not the machine.
        memory = Path("/dev/shm")
        folder = memory if os.access(memory, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="stemma-pg-", dir=folder))
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count()

    def __enter__(self) -> Postgres:
        if (user := _user()) is not None:
            os.chown(self._folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        initdb = [str(_program("initdb")), "-D", self._data, "-U", "stemma", "-A", "trust", "-E", "UTF8"]
        subprocess.run(
            [*initdb, "--locale=C", "--no-sync"], check=True, capture_output=True, user=_user(), cwd="/"
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def start(self) -> None:
        """Start it and wait until it answers."""
        server = [str(_program("postgres")), "-D", self._data, "-k", str(self._folder)]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*server, "-c", "listen_addresses="], stdout=log, stderr=log, user=_user(), cwd="/"
            )
        engine = sa.create_engine(self._url)
        give_up = time.monotonic() + START_S
        while True:
            try:
                engine.connect().close()
                break
            except sa.exc.OperationalError:
                if time.monotonic() > give_up or self._process.poll() is not None:
                    raise AssertionError((self._folder / "log").read_text()) from None
                time.sleep(0.05)
        engine.dispose()

    def kill(self) -> None:
        """End it as a crash does: it writes nothing more, and recovers from its log at the next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def new_database(self) -> str:
        """Make an empty schema, a database of its own to whoever uses the URL; return this."""
        name = f"ledger{next(self._numbers)}"
        engine = sa.create_engine(self._url)
        with engine.begin() as connection:
            connection.execute(sa.text(f"CREATE SCHEMA {name}"))
        engine.dispose()
        return f"{self._url}&options=-csearch_path%3D{name}"

    @property
    def _url(self) -> str:
        return f"postgresql+psycopg://stemma@/postgres?host={self._folder}"
