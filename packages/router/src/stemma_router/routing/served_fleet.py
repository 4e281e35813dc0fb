"""A fleet with all that keeps it up to date: its list of servers, checks, KV events, and prompts' tokens.

Both fronts stand on it, the proxy (`fleet.py`) and Envoy's endpoint picker (`picker/`). The servers may be
Stemma, vLLM, or anything that speaks OpenAI's API. Where one publishes KV events, it is known which blocks it
holds; for the others, the blocks of requests under way and rendezvous hashing of the prompt's beginning keep
conversations together. Token ids of a prompt come from a local tokenizer, or from the servers' own
`/tokenize`; without either, the beginning of the text decides.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
import orjson
from prometheus_client.core import Metric

from stemma.errors import ConfigError
from stemma.told import adapter_root
from stemma.types import TokenArray
from stemma_router.cluster.agreement import disagreements
from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.routers import ROUTERS, RoutedRequest
from stemma_router.routing.asking import TOKENIZE_TIMEOUT_S, PromptEncoder, as_tokens, ask_of, pooled_ask_of
from stemma_router.routing.checks import keep_checking
from stemma_router.routing.following import Following
from stemma_router.routing.metrics import counters, fleet_metrics, following_metrics, holdings_metrics
from stemma_router.routing.prompts import POOLED, PROMPT_FIELDS, adapter_of, messages_of, text_of, tokens_of
from stemma_router.routing.server_list import ServerList

if TYPE_CHECKING:  # torch isn't needed to pass requests on
    from stemma.model.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
WATCH_EVERY_S = 2.0
_RESOLVE_EVERY = 5
"""Names are resolved again every so many looks at the file."""
_NO_TOKENS_FOR_S = 30.0
"""How long a server isn't asked for tokens that has none, or is too slow."""
_PARSED_HERE_BYTES = 256 * 1024


class ServedFleet:
    """A fleet that follows its servers. For one event loop, within `serving`."""

    def __init__(
        self,
        source: ServerList,
        router: str,
        client: httpx.AsyncClient,
        *,
        tokenizer: Tokenizer | None = None,
        block_size: int = 64,
    ) -> None:
        """`block_size` names blocks until a server's events tell its own. Raises ConfigError."""
        if router not in ROUTERS:
            raise ConfigError(f"unknown router {router!r}; known: {', '.join(ROUTERS)}")
        has_events = any(server.events is not None for server in source.entries)
        urls = [server.url for server in source.entries if server.dns_name is None]
        self.fleet = Fleet(ROUTERS[router](), urls, has_events=has_events)
        self.num_reloads = 0
        self._source = source
        self._client = client
        self._following = Following(self.fleet)
        self._encoder = None if tokenizer is None else PromptEncoder(tokenizer)
        self._block_size = block_size
        self._no_tokens_until: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._warned: set[str] = set()

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that holdings are kept in."""
        return self._following.block_size or self._block_size

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep everything up to date meanwhile. SIGHUP reads the list of servers at once."""
        await self._update()
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):  # not on the main thread: then only the file is watched
            loop.add_signal_handler(signal.SIGHUP, self._changed.set)
        tasks = [
            asyncio.create_task(keep_checking(self.fleet, self._client)),
            asyncio.create_task(self._watch()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGHUP)
            await self._following.close()
            if self._encoder is not None:
                self._encoder.close()

    async def ask(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> RoutedRequest:
        """Return a request as the fleet sees it."""
        if path in POOLED:
            return pooled_ask_of(body, self.block_size)
        tokens = await self._tokens(path, body, headers)
        sizes = self.fleet.placements.block_sizes
        for place, size in self._following.block_sizes():
            sizes[place] = size
        others = set(sizes.values()) - {self.block_size}
        return ask_of(body, tokens, self.block_size, self._root_of(adapter_of(body)), others)

    def _root_of(self, name: str | None) -> int:
        """Return the root of the blocks of the adapter that a request names; 0: it names none."""
        if name is None:
            return 0
        hashed = adapter_root(name)
        told = (one.told.serves for one in self.fleet.members)
        roots = (dict(one.adapters).get(hashed) for one in told if one is not None)
        found = next((root for root in roots if root is not None), None)
        # vLLM tells no adapters, and names their blocks by the adapter's name.
        return found if found is not None else hashed * (hashed in self._following.roots)

    def warnings(self) -> list[str]:
        """Return what an operator should know of the servers, a sentence each."""
        told = {member.url: member.told.serves for member in self.fleet.members}
        return [*disagreements(told), *self._following.warnings()]

    def known(self) -> dict[str, dict[str, Any]]:
        """Return how many blocks of each server are known, and how its events are followed, by URL."""
        followed, holdings = self._following.describe(), self.fleet.placements.holdings
        return {
            one.url: {"known_blocks": holdings.num_blocks(one.place), "events": followed.get(one.url)}
            for one in self.fleet.members
        }

    def describe(self) -> dict[str, Any]:
        """Return what is known of the servers' blocks, and how."""
        holdings = self.fleet.placements.holdings
        return {
            "num_known_blocks": holdings.num_ids,
            "known_blocks": {one.url: holdings.num_blocks(one.place) for one in self.fleet.members},
            "block_size": self.block_size,
            "events": self._following.describe(),
            "warnings": self.warnings(),
        }

    def metrics(self) -> Iterable[Metric]:
        """Return all that is counted here."""
        yield from fleet_metrics({"equal": self.fleet})
        yield from following_metrics(self.fleet, self._following.describe())
        yield from holdings_metrics(self.fleet.placements.holdings, self._following.counters())
        yield from counters(
            {
                "reloads": ("Times that the list of servers changed", self.num_reloads),
            }
        )

    async def _watch(self) -> None:
        """Take up changes of the file, and of what names stand for."""
        look = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._changed.wait()
            look += 1
            self._warn()
            is_asked = self._changed.is_set()
            self._changed.clear()
            before = self._source.entries
            try:
                await asyncio.to_thread(self._source.reload)
            except ConfigError as error:
                _log.error("the servers stay as they were: %s", error)
            if is_asked or self._source.entries != before or look % _RESOLVE_EVERY == 0:
                await self._update()

    def _warn(self) -> None:
        """Log what is new of the warnings."""
        now = self.warnings()
        for text in now:
            if text not in self._warned:
                _log.warning("%s", text)
        self._warned = set(now)

    async def _update(self) -> None:
        servers = await self._source.current()
        urls = [server.url for server in servers]
        if set(urls) != {member.url for member in self.fleet.members if not member.is_leaving}:
            self.num_reloads += 1
            _log.warning("servers: %s", ", ".join(urls) or "none")
        self.fleet.set_servers(urls)
        self._following.follow(servers)

    async def _tokens(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> TokenArray | None:
        """Return the prompt's token ids; None if they can't be had."""
        if self._encoder is not None:
            return await self._encoder.tokens(path, body)
        given = tokens_of(body)
        if given is not None:
            return as_tokens(given)
        text, messages = text_of(body), messages_of(body)
        if text is None and messages is None:
            return None
        fields: dict[str, Any] = {"prompt": text} if messages is None else {"messages": messages}
        for name in PROMPT_FIELDS:
            if name in body:
                fields[name] = body[name]
        return await self._tokenized_by_a_server(orjson.dumps(fields), headers)

    async def _tokenized_by_a_server(self, content: bytes, headers: Mapping[str, str]) -> TokenArray | None:
        url = self.fleet.least_busy()
        now = time.monotonic()
        if url is None or self._no_tokens_until.get(url, 0.0) > now:
            return None
        try:
            answer = await self._client.post(
                f"{url}/tokenize", content=content, headers=headers, timeout=TOKENIZE_TIMEOUT_S
            )
        except httpx.HTTPError:
            self._no_tokens_until[url] = now + _NO_TOKENS_FOR_S
            return None
        if answer.status_code == 404:
            self._no_tokens_until[url] = now + _NO_TOKENS_FOR_S
        if answer.status_code != 200:
            return None
        if len(answer.content) <= _PARSED_HERE_BYTES:
            return _tokens_in(answer.content)
        return await asyncio.to_thread(_tokens_in, answer.content)


def _tokens_in(content: bytes) -> TokenArray | None:
    """Return the tokens that a server answered with; None if these are none."""
    try:
        tokens = orjson.loads(content)["tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(tokens, list) or not all(isinstance(one, int) for one in tokens):
        return None
    return as_tokens(tokens)
