"""One request of Envoy's: its headers and body come, the choice goes back, and then how it was answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from stemma.budgets import Budget, Holding
from stemma.errors import BodyTooLarge, InvalidRequest, OverBudget
from stemma.server.schemas.json_input import parse_json
from stemma_router.cluster.fleet import Try
from stemma_router.cluster.member import ASKED, FleetMember, Outcome
from stemma_router.cluster.routers import RoutedRequest
from stemma_router.routing.picker.endpoints import Endpoints
from stemma_router.routing.picker.messages import (
    BUFFERED,
    FULL_DUPLEX,
    body_pieces,
    go_on,
    headers_of,
    more_time,
    picked,
    refused,
    served_by,
    subset_of,
)
from stemma_router.routing.prompts import is_streamed, num_output_of
from stemma_router.routing.relay import CACHED_HEADER, MOST_HELD_BYTES
from stemma_router.routing.sending import hits_told, outcome_of, parsed_answer
from stemma_router.routing.served_fleet import ServedFleet

_MOST_ENDPOINTS = 3
"""The best server, and those that Envoy may try after it."""
SOON_S = 0.5
"""What takes longer asks Envoy for more time: its example gives a picker a second."""
_LONGEST_S = 10.0
_PASSED_ON = ("authorization", "x-api-key", "content-type", "x-request-id")
"""Headers that a server needs to tokenize for whoever asks."""


@asynccontextmanager
async def task_of(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run work beside; it ends with the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ends_within(task: asyncio.Task[None], seconds: float) -> bool:
    """Return whether a task ends in time; it goes on in any case."""
    await asyncio.wait({task}, timeout=seconds)
    return task.done()


class Exchange:
    """The life of one HTTP request, as Envoy tells it. `close` it at the end."""

    def __init__(
        self, served: ServedFleet, endpoints: Endpoints, bodies: Budget, max_body_bytes: int
    ) -> None:
        self._served = served
        self._endpoints = endpoints
        self._bodies = bodies
        self._max_body_bytes = max_body_bytes
        self._holding = Holding()
        self._headers: dict[str, str] = {}
        self._subset: list[str] | None = None
        self._content: list[bytes] | None = []
        """The body so far; None: it went on."""
        self._num_bytes = 0
        self._mode: object = BUFFERED
        self._ask = RoutedRequest((), 1, 1)
        self._is_streamed = False
        self._try: Try | None = None
        self._status = 0
        self._answer: list[bytes] | None = None
        """A whole answer so far, to measure its server by; None: it isn't read."""

    async def answers(self, message: ProcessingRequest) -> AsyncIterator[ProcessingResponse]:
        """Yield what goes back for a message."""
        if message.protocol_config is not None:
            self._mode = message.protocol_config.request_body_mode
        if message.request_headers is not None:
            self._headers = headers_of(message.request_headers.headers)
            self._subset = subset_of(message)
            is_whole = message.request_headers.end_of_stream
            if is_whole or self._mode not in (BUFFERED, FULL_DUPLEX):
                self._content = None
                yield self._picked(at_headers=True)
                return
            if self._mode == FULL_DUPLEX:
                return  # the choice goes into these headers: Envoy waits for the body
        elif message.request_body is not None and self._content is not None:
            async for answer in self._body(message.request_body.body, message.request_body.end_of_stream):
                yield answer
            return
        elif message.request_trailers is not None and self._content is not None:
            async for answer in self._body(b"", True):
                yield answer
        elif message.response_headers is not None:
            self._answered(headers_of(message.response_headers.headers), served_by(message))
        elif message.response_body is not None and self._answer is not None:
            await self._measure(message.response_body.body, message.response_body.end_of_stream)
        is_duplex = self._mode == FULL_DUPLEX  # then Envoy's configuration alone says what is sent
        wants_answer = self._answer is not None and not is_duplex
        for answer in go_on(message, pass_bodies=is_duplex, wants_answer=wants_answer):
            yield answer

    def close(self) -> None:
        """Envoy has ended the exchange: the answer is over, or never came."""
        self._holding.close()
        if self._try is not None:
            self._try.end(outcome_of(self._status) if self._status else Outcome.LEFT)

    async def _body(self, piece: bytes, is_last: bool) -> AsyncIterator[ProcessingResponse]:
        """Take a piece of a request's body; with the last one choose."""
        assert self._content is not None
        self._num_bytes += len(piece)
        try:
            if self._num_bytes > self._max_body_bytes:
                raise BodyTooLarge(f"the body has more than {self._max_body_bytes} bytes")
            self._holding.take(self._bodies, len(piece))
            self._content.append(piece)
            if not is_last and self._mode == FULL_DUPLEX:
                return
            content = b"".join(self._content)
            async with task_of(self._read(content)) as reading:
                if self._mode == BUFFERED and not await ends_within(reading, SOON_S):
                    yield more_time(_LONGEST_S)
                await reading
        except OverBudget as error:
            yield refused(429, str(error), 1)
            return
        except InvalidRequest as error:
            yield refused(413 if isinstance(error, BodyTooLarge) else 400, str(error))
            return
        self._content = None
        self._holding.close()
        yield self._picked(at_headers=self._mode == FULL_DUPLEX)
        if self._mode == FULL_DUPLEX and self._try is not None:
            for answer in body_pieces(content, of_request=True, is_last=is_last):
                yield answer

    async def _read(self, content: bytes) -> None:
        """Learn what the prompt is; what isn't JSON, or is compressed, is placed without one."""
        is_json = "json" in self._headers.get("content-type", "application/json")
        if not content or not is_json or self._headers.get("content-encoding", "identity") != "identity":
            return
        body = await asyncio.to_thread(parse_json, content)
        if isinstance(body, dict):
            headers = {name: self._headers[name] for name in _PASSED_ON if name in self._headers}
            path = self._headers.get(":path", "").partition("?")[0]
            self._is_streamed = is_streamed(path, body)
            self._ask = await self._served.ask(path, body, headers)

    def _picked(self, *, at_headers: bool) -> ProcessingResponse:
        fleet = self._served.fleet
        allowed = [one for one in fleet.order(self._ask) if self._is_allowed(one)]
        usable = [one for one in allowed if one.health.standing in ASKED] or allowed
        if not usable:
            return refused(503, "no server answers", 1)
        self._try = self._begun(usable[0], is_retry=False)
        endpoints = [self._endpoints.of(one.url) for one in usable[:_MOST_ENDPOINTS]]
        limit_s = self._try.limit_s if len(usable) > 1 else None  # else it is better waited for
        return picked(endpoints, at_headers=at_headers, limit_s=limit_s)

    def _is_allowed(self, member: FleetMember) -> bool:
        return self._subset is None or self._endpoints.of(member.url) in self._subset

    def _begun(self, member: FleetMember, *, is_retry: bool) -> Try:
        if self._try is not None:
            self._try.end(Outcome.LEFT)  # unless it has ended: there is one try at a time
        # When Envoy began a retry nobody says: it measures nothing, as if it weren't streamed.
        is_streamed = self._is_streamed and not is_retry
        return self._served.fleet.begin(member, self._ask, is_retry=is_retry, is_streamed=is_streamed)

    def _answered(self, headers: dict[str, str], served: str | None) -> None:
        """Note how the request was answered, and by whom: Envoy may have gone on to the next endpoint."""
        first = one = self._try
        status = headers.get(":status", "")
        self._status = int(status) if status.isascii() and status.isdecimal() and len(status) == 3 else 0
        if one is None:
            return
        if served is not None and served != self._endpoints.of(one.url):
            one.end(Outcome.UNSENT)
            member = next(
                (m for m in self._served.fleet.members if self._endpoints.of(m.url) == served), None
            )
            one = self._try = None if member is None else self._begun(member, is_retry=True)
        elif served is None and self._status == 503:  # Envoy's own: it reached nobody
            one.end(Outcome.UNSENT)
        if one is not None and outcome_of(self._status) is Outcome.ANSWERED:
            one.first_byte()
            one.delivered(hits_told(headers.get(CACHED_HEADER, "")) or 0)
            if one is first and not self._is_streamed and _is_short_json(headers):
                self._answer = []

    async def _measure(self, piece: bytes, is_last: bool) -> None:
        """Take a piece of a whole answer; with the last one note how fast its server was."""
        assert self._answer is not None
        self._answer.append(piece)
        try:
            self._holding.take(self._bodies, len(piece))
        except OverBudget:
            self._answer = None
            return
        if is_last and self._try is not None:
            num_output = num_output_of(await parsed_answer(b"".join(self._answer)))
            if num_output is not None:
                self._try.whole(num_output)
        if is_last or sum(map(len, self._answer)) > MOST_HELD_BYTES:
            self._answer = None
            self._holding.close()


def _is_short_json(headers: Mapping[str, str]) -> bool:
    """Return whether an answer is JSON that can be read here; one of unknown length may be."""
    length = headers.get("content-length", "0")
    is_short = length.isascii() and length.isdecimal() and len(length) < 9 and int(length) <= MOST_HELD_BYTES
    return is_short and "json" in headers.get("content-type", "") and "content-encoding" not in headers
