"""A proxy in front of equal servers: each request goes where computing it, and waiting, costs least.

The servers may be Stemma, vLLM, or anything that speaks OpenAI's API. Where one publishes KV events, the
proxy knows which blocks it holds; for the others, the blocks of requests under way and rendezvous hashing of
the prompt's beginning keep conversations together. Token ids of a prompt come from a local tokenizer, or from
the servers' own `/tokenize`; without either, the beginning of the text decides.

Which server that is, and which one follows if it fails, `cluster/fleet.py` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stemma.cluster.fleet import Fleet
from stemma.cluster.holdings_writer import HoldingsWriter
from stemma.cluster.routers import ROUTERS
from stemma.errors import ConfigError
from stemma.server.routing.app import create_proxy_app
from stemma.server.routing.asking import TOKENIZE_TIMEOUT_S, PromptEncoder, as_tokens, ask_of
from stemma.server.routing.checks import keep_checking
from stemma.server.routing.description import describe
from stemma.server.routing.prompts import is_streamed, messages_of, text_of, tokens_of
from stemma.server.routing.relay import (
    Relay,
    RouteOptions,
    kept_headers,
    path_of,
    read_body,
    relay_client,
)
from stemma.server.routing.sending import Outgoing, send
from stemma.types import TokenArray

if TYPE_CHECKING:  # torch isn't needed to pass requests on
    from stemma.model.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetServer:
    """One server."""

    url: str
    events: str | None = None
    """ZMQ address of its KV events."""
    replay: str | None = None
    """ZMQ address where missed events can be asked for."""

    @classmethod
    def parse(cls, text: str) -> FleetServer:
        """Read ``URL[,events=ADDRESS[,replay=ADDRESS]]``. Raises ConfigError."""
        url, *rest = text.split(",")
        fields = dict(part.partition("=")[::2] for part in rest)
        if not url.startswith(("http://", "https://")) or not set(fields) <= {"events", "replay"}:
            raise ConfigError(f"a server is URL[,events=ADDRESS[,replay=ADDRESS]], not {text!r}")
        if "replay" in fields and "events" not in fields:
            raise ConfigError(f"{text!r}: replay needs events")
        return cls(url.rstrip("/"), fields.get("events"), fields.get("replay"))


class FleetProxy:
    """Servers, what they hold, and what they are doing. For one event loop."""

    def __init__(
        self,
        servers: Sequence[FleetServer],
        router: str,
        relay: Relay,
        *,
        tokenizer: Tokenizer | None = None,
        block_size: int = 64,
    ) -> None:
        """`block_size` names blocks until a server's events tell its own. Raises ConfigError."""
        if not servers:
            raise ConfigError("name at least one server")
        if router not in ROUTERS:
            raise ConfigError(f"unknown router {router!r}; known: {', '.join(ROUTERS)}")
        self.servers = tuple(servers)
        self.relay = relay
        has_events = any(server.events is not None for server in servers)
        self.fleet = Fleet(ROUTERS[router](), [server.url for server in servers], has_events=has_events)
        self.num_requests = 0
        self._encoder = None if tokenizer is None else PromptEncoder(tokenizer)
        self._block_size = block_size
        self._followers: list[Any] = []
        self._writer = HoldingsWriter()

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that holdings are kept in."""
        sizes = (follower.block_size for follower in self._followers)
        return next((size for size in sizes if size is not None), self._block_size)

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that can be asked now."""
        return self.fleet.urls

    async def is_up(self) -> bool:
        """Return whether any server can be asked."""
        return self.fleet.is_up

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Follow the servers' KV events and check the servers meanwhile."""
        tasks = [asyncio.create_task(self.follow())]
        tasks.append(asyncio.create_task(keep_checking(self.fleet, self.relay.client)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writer.close()
            if self._encoder is not None:
                self._encoder.close()

    async def follow(self) -> None:
        """Follow the servers' KV events until cancelled; one that fails is logged, the others go on."""
        if not any(server.events for server in self.servers):
            return
        from stemma.kv_events.follower import Follower  # ZMQ is an extra
        from stemma.kv_events.subscriber import Subscription

        async def one(url: str, follower: Follower, subscription: Subscription) -> None:
            try:
                await subscription.run()
            except Exception:  # noqa: BLE001 - logged with its traceback
                follower.clear()
                _log.exception("%s: its KV events aren't followed any more", url)

        async with asyncio.TaskGroup() as group:
            for server in self.servers:
                member = self.fleet.member(server.url)
                if server.events is not None and member is not None:
                    follower = Follower(member.place, self.fleet.placements.holdings)
                    self._followers.append(follower)
                    subscription = Subscription(
                        follower, server.events, server.replay, apply=self._writer.apply
                    )
                    group.create_task(one(server.url, follower, subscription))

    async def generate(self, request: Request, content: bytes) -> Response:
        """Answer a request that generates."""
        self.num_requests += 1
        body = await read_body(request, content)
        headers, path = kept_headers(request), path_of(request)
        ask = ask_of(body, await self._tokens(body, headers), self.block_size)
        streams = is_streamed(request.scope["path"], body)
        continues = "previous_response_id" in body
        outgoing = Outgoing(path, content, headers, streams, continues)
        answer, _ = await send(self.fleet, self.relay, ask, outgoing)
        return answer

    async def _tokens(self, body: dict[str, Any], headers: dict[str, str]) -> TokenArray | None:
        """Return the prompt's token ids; None if they can't be had."""
        if self._encoder is not None:
            return await self._encoder.tokens(body)
        given = tokens_of(body)
        if given is not None:
            return as_tokens(given)
        text, messages = text_of(body), messages_of(body)
        if text is None and messages is None:
            return None
        fields: dict[str, Any] = {"prompt": text} if messages is None else {"messages": messages}
        for name in ("model", "tools", "chat_template_kwargs"):
            if name in body:
                fields[name] = body[name]
        return await self._tokenized_by_a_server(orjson.dumps(fields), headers)

    async def _tokenized_by_a_server(self, content: bytes, headers: dict[str, str]) -> TokenArray | None:
        url = self.fleet.least_busy()
        if url is None:
            return None
        try:
            answer = await self.relay.client.post(
                f"{url}/tokenize",
                content=content,
                headers=headers,
                timeout=TOKENIZE_TIMEOUT_S,
            )
            tokens = answer.json()["tokens"] if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(tokens, list) or not all(isinstance(one, int) for one in tokens):
            return None
        return as_tokens(tokens)

    def describe(self) -> dict[str, Any]:
        """Return what is known of each server."""
        return {
            "num_requests": self.num_requests,
            "num_broken_streams": self.relay.num_broken_streams,
            "num_known_blocks": self.fleet.placements.holdings.num_ids,
            "block_size": self.block_size,
            **describe(self.fleet),
        }


def create_fleet_app(
    servers: Sequence[FleetServer],
    router: str = "cache-aware",
    *,
    client: httpx.AsyncClient | None = None,
    options: RouteOptions | None = None,
    tokenizer: Tokenizer | None = None,
) -> FastAPI:
    """Return the proxy. Raises ConfigError for an unknown router, no servers, or events without ZMQ."""
    if any(server.events for server in servers) and find_spec("zmq") is None:
        raise ConfigError("KV events need ZMQ: pip install 'stemma[events]'")
    options = options or RouteOptions()
    proxy = FleetProxy(servers, router, Relay(client or relay_client(), options), tokenizer=tokenizer)
    return create_proxy_app(proxy, options)
