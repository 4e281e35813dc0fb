"""Servers as Envoy names them: `IP:PORT`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from stemma.errors import ConfigError

_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """Endpoints by URL."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, url: str) -> str:
        """Return the endpoint of a server. Raises ConfigError if its URL has no address."""
        if url not in self._known:
            self._known[url] = endpoint_of(url)
        return self._known[url]


def endpoint_of(url: str) -> str:
    """Return a URL's host and port as Envoy writes them. Raises ConfigError if the host is no IP address."""
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        raise ConfigError(
            f"Envoy is told IP addresses, and {url} has a name: write dns+{url}, or the address"
        ) from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def check_endpoints(urls: Iterable[str]) -> None:
    """Raise ConfigError if a server's URL has no address."""
    for url in urls:
        endpoint_of(url)
