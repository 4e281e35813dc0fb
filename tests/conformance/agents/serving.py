"""A server process whose model follows the plan, and what it tells of each request."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.conformance.agents.scripted_stemma import EXCHANGES
from tests.conformance.agents.tiny import ROOT

_READY = re.compile(r"^Ready: (\S+)", re.MULTILINE)
_LINE = re.compile(r"^\S+ \S+ request=(\S+) (.*outcome=.*)$", re.MULTILINE)
_START_S = 60.0


@dataclass(frozen=True)
class Exchange:
    """A request over HTTP."""

    path: str
    status: int
    headers: dict[str, str]
    body: bytes
    answer: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Computed:
    """What the engine had to do for a request."""

    num_prompt: int
    num_cached: int
    num_from_disk: int
    num_generated: int
    reason: str

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that weren't cached."""
        return self.num_prompt - self.num_cached


@dataclass
class ScriptedServer:
    """Context manager: `scripted_stemma` on a free port."""

    model: Path
    directory: Path
    """For its log, and what it notes of exchanges."""
    flags: tuple[str, ...] = ()
    name: str = ""
    """What the model is called; "": as its directory."""
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    _seen: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> ScriptedServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def served_name(self) -> str:
        """What the model is called."""
        return self.name or self.model.name

    def start(self) -> None:
        """Start it and wait until it takes requests."""
        self._log = (self.directory / "log").open("ab")
        size = self._log.tell()
        command = [sys.executable, "-m", "tests.conformance.agents.scripted_stemma", "serve", str(self.model)]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--log-requests", "--served-name", self.served_name, *self.flags],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, EXCHANGES: str(self.directory / "exchanges")},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        end = time.monotonic() + _START_S
        while (found := _READY.search(self.log()[size:])) is None:
            assert self._process.poll() is None, self.log()[-2000:]
            assert time.monotonic() < end, "the server isn't ready in time"
            time.sleep(0.05)
        self.url = found.group(1)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def log(self) -> str:
        """Return what it printed, of all its runs."""
        return (self.directory / "log").read_text(errors="replace")

    def exchanges(self) -> list[Exchange]:
        """Return the exchanges since the last call."""
        file = self.directory / "exchanges"
        lines = file.read_text().splitlines() if file.exists() else []
        return [_exchange(json.loads(line)) for line in self._news("exchanges", lines)]

    def computed(self) -> list[Computed]:
        """Return what requests that the engine served since the last call cost, in order of their ends."""
        found = _LINE.findall(self.log())
        return [_computed(told) for _, told in self._news("log", found) if "outcome=ok" in told]

    def _news(self, name: str, found: list[Any]) -> list[Any]:
        seen, self._seen[name] = self._seen.get(name, 0), len(found)
        return found[seen:]


def _exchange(line: dict[str, Any]) -> Exchange:
    headers = dict(line["headers"])
    body, answer = base64.b64decode(line["body"]), base64.b64decode(line["answer"])
    return Exchange(line["path"], line.get("status", 0), headers, body, answer)


def _computed(told: str) -> Computed:
    fields = dict(part.split("=", 1) for part in told.split() if "=" in part)
    return Computed(
        int(fields["prompt_tokens"]),
        int(fields["cached_tokens"]),
        int(fields.get("from_disk", 0)),
        int(fields["generated_tokens"]),
        fields.get("miss", ""),
    )
