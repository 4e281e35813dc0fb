"""Chooses one of several equal servers for a prompt: the one that had its beginning, unless it is busy.

The beginnings of prompts are distributed over the servers by rendezvous hashing: the beginning is hashed with
each server's name, and the highest hash wins. So a conversation stays where its blocks are, no state is kept,
and adding or removing a server moves only its own share. A server with far more open requests than the least
busy one is skipped, so that many users of one system prompt don't all wait for one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash

_LEAD = 4
"""Requests that a server may have under way beyond twice those of the least busy one."""


class Balance:
    """Requests under way by server, and an order in which to try servers."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._under_way: Counter[str] = Counter()

    def order(self, head: bytes) -> list[str]:
        """Return all servers: the best for prompts that begin with `head` first, overloaded ones last."""
        least = min(self._under_way[url] for url in self.urls)
        most = 2 * least + _LEAD
        by_score = sorted(self.urls, key=lambda url: xxhash.xxh3_64_intdigest(head, _seed(url)), reverse=True)
        is_busy = {url: self._under_way[url] >= most for url in self.urls}
        free = [url for url in by_score if not is_busy[url]]
        busy = sorted((url for url in by_score if is_busy[url]), key=lambda url: self._under_way[url])
        return free + busy

    def begin(self, url: str) -> None:
        """A request goes to this server."""
        self._under_way[url] += 1

    def end(self, url: str) -> None:
        """The request was answered or failed."""
        self._under_way[url] -= 1

    def under_way(self) -> dict[str, int]:
        """Return the number of requests under way by server."""
        return {url: self._under_way[url] for url in self.urls}


def _seed(url: str) -> int:
    return xxhash.xxh3_64_intdigest(url.encode())
