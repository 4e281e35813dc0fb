"""Chooses one of several equal servers for a prompt: the one that had its beginning, unless it is busy.

The beginnings of prompts are distributed over the servers by rendezvous hashing (cluster/rendezvous.py). A
server with far more open requests than the least busy one is skipped, so that many users of one system prompt
don't all wait for one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash

from stemma.cluster.rendezvous import OVERLOADED_BY, rendezvous_order


class Balance:
    """Requests under way by server, and an order in which to try servers."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._numbers = [xxhash.xxh3_64_intdigest(url.encode()) for url in self.urls]
        self._under_way: Counter[str] = Counter()

    def order(self, head: bytes) -> list[str]:
        """Return all servers: the best for prompts that begin with `head` first, overloaded ones last."""
        least = min(self._under_way[url] for url in self.urls)
        most = 2 * least + OVERLOADED_BY
        by_score = [self.urls[place] for place in rendezvous_order(head, self._numbers)]
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
