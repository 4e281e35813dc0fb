"""The servers that a router stands before: from its command line, a file that may change, and DNS.

A line is `URL[,events=ADDRESS[,replay=ADDRESS]]`; `#` begins a comment. With `dns+http://NAME:PORT` there is
one server for each address that the name has; where the same name stands in `events` and `replay`, it is the
same address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from stemma.errors import ConfigError

_log = logging.getLogger(__name__)

_DNS = "dns+"
_MAX_SERVERS = 4096
_SHAPE = "a server is URL[,events=ADDRESS[,replay=ADDRESS]]"
Resolve = Callable[[str], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class FleetServer:
    """One server, or all that a DNS name stands for."""

    url: str
    events: str | None = None
    """ZMQ address of its KV events."""
    replay: str | None = None
    """ZMQ address where missed events, and snapshots, can be asked for."""

    @classmethod
    def parse(cls, text: str) -> FleetServer:
        """Read ``URL[,events=ADDRESS[,replay=ADDRESS]]``. Raises ConfigError."""
        url, *rest = text.split(",")
        fields = dict(part.partition("=")[::2] for part in rest)
        schemes = ("http://", "https://", f"{_DNS}http://")
        if not url.startswith(schemes) or not set(fields) <= {"events", "replay"}:
            raise ConfigError(f"{_SHAPE}, with http, https or {_DNS}http, not {text!r}")
        try:
            has_host = bool(urlsplit(url.removeprefix(_DNS)).hostname) and urlsplit(url).port != 0
        except ValueError:
            has_host = False
        if not has_host:
            raise ConfigError(f"{text!r} names no host, or no port; {_SHAPE}")
        if "replay" in fields and "events" not in fields:
            raise ConfigError(f"{text!r}: replay needs events")
        return cls(url.rstrip("/"), fields.get("events"), fields.get("replay"))

    @property
    def dns_name(self) -> str | None:
        """The name whose addresses are servers; None: this is one server."""
        return urlsplit(self.url.removeprefix(_DNS)).hostname if self.url.startswith(_DNS) else None

    def at(self, address: str) -> FleetServer:
        """Return the server that an address of the DNS name is."""
        name = self.dns_name or ""
        host = f"[{address}]" if ":" in address else address

        def moved(text: str | None) -> str | None:
            return None if text is None else text.replace(f"//{name}:", f"//{host}:", 1)

        return replace(
            self,
            url=moved(self.url.removeprefix(_DNS)) or "",
            events=moved(self.events),
            replay=moved(self.replay),
        )


async def addresses_of(name: str) -> Sequence[str]:
    """Return the addresses of a DNS name, in order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(ipaddress.ip_address(str(info[4][0]).partition("%")[0])) for info in found})


class ServerList:
    """Where the servers of a router come from."""

    def __init__(
        self,
        named: Sequence[str | FleetServer] = (),
        path: Path | None = None,
        resolve: Resolve = addresses_of,
    ) -> None:
        """Raises ConfigError if what is named, or the file, can't be used."""
        self._named = [FleetServer.parse(one) if isinstance(one, str) else one for one in named]
        self._path = path
        self._resolve = resolve
        self._addresses: dict[str, Sequence[str]] = {}
        """The latest of each DNS name."""
        self.entries = self._read()

    def reload(self) -> None:
        """Read the file again. Raises ConfigError; then everything stays as it was."""
        self.entries = self._read()

    async def current(self) -> list[FleetServer]:
        """Return the servers now. A DNS name that can't be resolved has the addresses that it had last."""
        servers: dict[str, FleetServer] = {}
        for entry in self.entries:
            name = entry.dns_name
            if name is None:
                servers.setdefault(entry.url, entry)
                continue
            try:
                self._addresses[name] = await self._resolve(name)
            except (OSError, ValueError) as error:
                _log.warning("%s can't be resolved: %s", name, error)
            for address in self._addresses.get(name, ()):
                one = entry.at(address)
                servers.setdefault(one.url, one)
        return list(servers.values())[:_MAX_SERVERS]

    def _read(self) -> list[FleetServer]:
        entries = list(self._named)
        if self._path is not None:
            try:
                lines = self._path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the list of servers {self._path} can't be read: {error}") from error
            kept = (line.partition("#")[0].strip() for line in lines)
            entries += [FleetServer.parse(line) for line in kept if line]
        if not entries:
            raise ConfigError("name at least one server")
        return entries
