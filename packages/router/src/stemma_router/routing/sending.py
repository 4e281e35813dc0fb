"""One request's way through a fleet: sent, judged, and sent again where the fleet's rules allow it."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import orjson
from starlette.responses import Response

from stemma.server.errors import json_response
from stemma_router.cluster.fleet import Fleet, Try
from stemma_router.cluster.member import Outcome
from stemma_router.cluster.routers import RoutedRequest
from stemma_router.cluster.tries import Tries
from stemma_router.routing.prompts import num_cached_of, num_output_of
from stemma_router.routing.relay import (
    BINARY_HEADER,
    CACHED_HEADER,
    NOT_FOUND,
    Relay,
    Relayed,
    nobody_answers,
)

_log = logging.getLogger(__name__)

_NO_RESPONSE = b"previous_response_id"
"""Stands in the refusal of a server that hasn't stored that response."""
_BY_STATUS = {
    401: Outcome.REFUSED,
    403: Outcome.REFUSED,
    NOT_FOUND: Outcome.ELSEWHERE,
    424: Outcome.FAILED,  # TGI's word for an engine that failed
    429: Outcome.REFUSED,
    501: Outcome.ANSWERED,
    503: Outcome.BUSY,
}
_SSE = (b"data:", b"event:", b"id:", b"retry:", b":")
"""First bytes of a stream of events."""
_JSON = (b"{", b"[")
_PARSED_HERE_BYTES = 256 * 1024
"""Larger answers are parsed on a thread."""
_PARSING = threading.Lock()
"""One after the other: parsed, they take many times their bytes."""
_LONGEST_REST_S = 60.0
"""How long a busy server is asked last at most, whatever it says."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as it goes to a server."""

    path: str
    """With the query."""
    content: bytes
    headers: dict[str, str]
    is_streamed: bool
    """Its first byte comes as soon as its prompt is computed."""
    continues: bool = False
    """It goes on from a response that a server stored."""
    is_optional: bool = False
    """Others do without its answer, which comes whole once its prompt is computed."""


async def send(fleet: Fleet, relay: Relay, ask: RoutedRequest, outgoing: Outgoing) -> tuple[Response, bool]:
    """Return the first answer that is the client's; else the last one, or 503 if there is none.

    And whether servers beyond this fleet may get the request: it was begun once at most, nowhere answered.
    """
    tries = Tries(fleet, ask, is_streamed=outgoing.is_streamed, is_optional=outgoing.is_optional)
    answer = nobody_answers()
    while (one := tries.next()) is not None:
        try:
            response, outcome = await _tried(relay, one, tries, outgoing)
            if isinstance(response, Relayed):
                if outcome is Outcome.ANSWERED:
                    _follow(one, response)
                    return response, False
                await response.drop()
                response = _unusable() if response.status_code < 500 else Response(b"", response.status_code)
        except BaseException:  # the client left
            one.end(Outcome.LEFT)
            raise
        if outgoing.is_optional and response is not None and response.status_code == 200:
            one.first_byte()
        one.end(outcome, _retry_after_s(response))
        answer = response or answer
    return answer, tries.may_go_on


async def _tried(relay: Relay, one: Try, tries: Tries, outgoing: Outgoing) -> tuple[Response | None, Outcome]:
    """Send a request to one server; return its answer, if there is one, and what that says."""
    try:
        response = await _asked(relay, one, tries, outgoing)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        _log.warning("%s: %s", one.url, str(error) or type(error).__name__)
        return None, Outcome.UNSENT
    except httpx.ReadTimeout:  # an hour without a byte: whoever computes it next needs as long
        return json_response({"error": {"message": "the answer took too long"}}, 504), Outcome.BROKEN
    except httpx.HTTPError as error:
        _log.warning("%s: %s", one.url, str(error) or type(error).__name__)
        return None, Outcome.FAILED
    if isinstance(response, Outcome):
        return None, response
    return await _judged(response, one, outgoing)


async def _asked(relay: Relay, one: Try, tries: Tries, outgoing: Outgoing) -> Response | Outcome:
    """Return a server's answer; LOST if it falls silent, LATE if it is late and another one may be asked.

    Raises HTTPError.
    """
    asking = asyncio.ensure_future(relay.ask(one.url + outgoing.path, outgoing.content, outgoing.headers))
    lost = asyncio.get_running_loop().create_future()
    one.on_lost = partial(_settle, lost)
    try:
        while True:
            await asyncio.wait({asking, lost}, timeout=one.limit_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            if lost.done() or tries.can_move():
                _log.warning("%s: %s", one.url, "it fell silent" if lost.done() else "no byte in time")
                await _give_up(asking)
                return Outcome.LOST if lost.done() else Outcome.LATE
    except asyncio.CancelledError:
        await _give_up(asking)
        raise


async def _give_up(asking: asyncio.Future[Response]) -> None:
    asking.cancel()
    [answer] = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(answer, Relayed):
        await answer.drop()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _judged(response: Response, one: Try, outgoing: Outgoing) -> tuple[Response, Outcome]:
    """Return an answer and what it says; one that nobody can read becomes 502."""
    status = response.status_code
    if status >= 400:
        is_gone = status == 400 and outgoing.continues and not isinstance(response, Relayed)
        if is_gone and _NO_RESPONSE in bytes(response.body):
            return response, Outcome.ELSEWHERE
        return response, outcome_of(status)
    one.delivered(hits_told(response.headers.get(CACHED_HEADER, "")) or 0)
    if isinstance(response, Relayed):
        begin = response.first.lstrip(b"\xef\xbb\xbf\r\n\t ")
        is_known = any(begin.startswith(word) or (begin and word.startswith(begin)) for word in _SSE)
        if not response.is_stream:  # too large to be held: its end isn't here yet
            is_known = begin.startswith(_JSON) or BINARY_HEADER in outgoing.headers
        return response, Outcome.ANSWERED if is_known else Outcome.FAILED
    content = bytes(response.body)
    if BINARY_HEADER in outgoing.headers:  # binary tensors: an answer need only be there
        return (response, Outcome.ANSWERED) if content else (_unusable(), Outcome.FAILED)
    if (parsed := await parsed_answer(content)) is None:
        return _unusable(), Outcome.FAILED
    if CACHED_HEADER not in response.headers:
        one.delivered(num_cached_of(parsed) or 0)
    if (num_output := num_output_of(parsed)) is not None:
        one.whole(num_output)
    return response, Outcome.ANSWERED


def hits_told(header: str) -> int | None:
    """Return the prompt tokens that a header says were cached; None: it says nothing."""
    return int(header) if header.isascii() and header.isdecimal() and len(header) < 9 else None


def outcome_of(status: int) -> Outcome:
    """Return what an HTTP status says of a try."""
    return _BY_STATUS.get(status, Outcome.FAILED if status >= 500 else Outcome.ANSWERED)


async def parsed_answer(content: bytes) -> dict[str, Any] | list[Any] | None:
    """Return a whole answer; None if it is no JSON."""
    if len(content) <= _PARSED_HERE_BYTES:
        return _json(content)
    return await asyncio.to_thread(_parsed_alone, content)


def _parsed_alone(content: bytes) -> dict[str, Any] | list[Any] | None:
    with _PARSING:
        return _json(content)


def _json(content: bytes) -> dict[str, Any] | list[Any] | None:
    try:
        parsed: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict | list) else None


def _follow(one: Try, response: Relayed) -> None:
    """Let a stream end its try, and a server that falls silent end the stream."""
    one.first_byte()
    one.on_lost = response.lose
    response.when_over = lambda: one.end(Outcome.BROKEN if response.is_broken else Outcome.ANSWERED)


def _unusable() -> Response:
    error = {"message": "a server's answer can't be read", "type": "server_error", "code": "bad_answer"}
    return json_response({"error": error}, 502)


def _retry_after_s(response: Response | None) -> float:
    """Return the seconds that a busy server asks for; 1 if it doesn't say."""
    given = "" if response is None else response.headers.get("retry-after", "")
    is_number = given.isascii() and given.isdecimal() and len(given) < 6
    return min(float(given), _LONGEST_REST_S) if is_number else 1.0
