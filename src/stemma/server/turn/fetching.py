"""Fetches images that clients name by URL: from public addresses alone, with limits of size and time.

A client could have the server ask its own network. So a host's name is resolved once, every address that it
has must be public, and the connection goes to an address that was checked, not to what a second look-up says.
A redirect is a new URL, checked like the first. No connection serves two fetches, since it is to an address
and its certificate was checked for one name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import httpx

from stemma.config.settings import ImageSettings
from stemma.errors import InvalidRequest, TookTooLong
from stemma.http import async_http_client

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
_NAT64 = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")
_TYPES = "image/png, image/jpeg, image/webp, image/gif"


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, and leads to none of another network."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None:
            return False
        if any(address in network for network in _NAT64):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]


@dataclass(frozen=True, slots=True)
class _Checked:
    """A URL, and the address to ask."""

    url: httpx.URL
    address: Address

    @property
    def at_address(self) -> httpx.URL:
        """The URL with the address in place of the host's name."""
        return self.url.copy_with(host=str(self.address))


class ImageFetcher:
    """Fetches one image at a time for each caller. Keeps nothing."""

    def __init__(
        self,
        settings: ImageSettings,
        *,
        resolver: Callable[[str, int], Awaitable[list[Address]]] = resolve,
        may_connect: Callable[[Address], bool] = is_public,
    ) -> None:
        self._limit_s, self._max_bytes = settings.url_timeout_s, settings.max_bytes
        self._resolve, self._may_connect = resolver, may_connect
        self._tls = httpx.create_ssl_context(trust_env=False)

    async def fetch(self, url: str, name: str) -> bytes:
        """Return what lies at `url`. Errors call it `name`, and say nothing of what else is there.

        Raises InvalidRequest for a URL that isn't allowed or brings no file within the limits, TookTooLong.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._follow(url, name)
        except TimeoutError as error:
            message = f"{name}: fetching it took more than {self._limit_s:g} s"
            raise TookTooLong(message, param="messages") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise _refused(name, "can't be fetched") from error

    async def _follow(self, url: str, name: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            checked = await self._checked(url, name)
            found = await self._get(checked, name)
            if isinstance(found, bytes):
                return found
            url = str(checked.url.join(found))
        raise _refused(name, f"is redirected more than {MAX_REDIRECTS} times")

    async def _checked(self, given: str, name: str) -> _Checked:
        if len(given) > MAX_URL_CHARS:
            raise _refused(name, f"has a URL of more than {MAX_URL_CHARS} characters")
        url = httpx.URL(given)
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise _refused(name, "needs a data:, http: or https: URL without a password")
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await self._resolve(url.host, port)
        if not addresses or not all(self._may_connect(one) for one in addresses):
            raise _refused(name, "is at an address that isn't public")
        return _Checked(url, addresses[0])

    async def _get(self, checked: _Checked, name: str) -> bytes | str:
        """Return the file, or where it is said to be."""
        url = checked.url
        headers = {"host": url.netloc.decode("ascii"), "accept": _TYPES, "accept-encoding": "identity"}
        async with async_http_client(verify=self._tls, timeout=self._limit_s) as client:
            request = client.build_request(
                "GET", checked.at_address, headers=headers, extensions={"sni_hostname": url.host}
            )
            answer = await client.send(request, stream=True)
            try:
                if answer.is_redirect:
                    return answer.headers["location"]
                if answer.status_code != httpx.codes.OK:
                    raise _refused(name, f"can't be fetched: its server answers {answer.status_code}")
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise _refused(name, "comes in an encoding that wasn't asked for")
                return await self._body(answer, name)
            finally:
                await answer.aclose()

    async def _body(self, answer: httpx.Response, name: str) -> bytes:
        data = bytearray()
        async for chunk in answer.aiter_raw():
            data += chunk
            if len(data) > self._max_bytes:
                raise _refused(name, f"has more than {self._max_bytes} bytes")
        return bytes(data)


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {why}", param="messages")
