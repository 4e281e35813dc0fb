"""A client of completions that costs little: for measuring a server on the cores that the client uses too.

`stemma.cli.client` takes 0.2 ms of a core for each event (httpx), twice the server's own share. If a step of
eight answers takes 30 ms of two cores, that is 3 % of the speed. Here all streams are looked at every 20 ms,
in one go: a client that wakes for each event takes a core away from the step eight times, and a step waits
for its slowest thread.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from stemma.cli.client import RequestFailed, StreamedAnswer

POLL_S = 0.02
"""How late an event may be noticed, the first and the last alike."""
_TIMEOUT_S = 600.0
_RECEIVE_BYTES = 1 << 18
_GENERATED = re.compile(rb'"completion_tokens":\s*(\d+)')


def stream_completions(base_url: str, bodies: Sequence[dict[str, Any]]) -> list[StreamedAnswer]:
    """POST streamed completions at once; return their times and numbers of tokens, without their text.

    Each body must ask for usage in the stream. Raises RequestFailed unless all statuses are 200 and usage
    came, OSError if the connection fails.
    """
    return _post_all(base_url, [{**body, "stream": True} for body in bodies], poll_s=POLL_S)


def whole_completions(base_url: str, bodies: Sequence[dict[str, Any]]) -> list[StreamedAnswer]:
    """POST completions that aren't streamed at once; otherwise as `stream_completions`.

    Nothing comes before the end, so that is noticed at once.
    """
    return _post_all(base_url, bodies, poll_s=0.0)


def _post_all(base_url: str, bodies: Sequence[dict[str, Any]], *, poll_s: float) -> list[StreamedAnswer]:
    place = urlsplit(base_url)
    assert place.hostname is not None
    assert place.port is not None
    streams = []
    with selectors.DefaultSelector() as selector:
        try:
            for body in bodies:
                streams.append(stream := _Stream(place.hostname, place.port, body))
                selector.register(stream.socket, selectors.EVENT_READ, stream)
            deadline = time.monotonic() + _TIMEOUT_S
            while selector.get_map():
                if time.monotonic() > deadline:
                    raise RequestFailed(f"no end of the answers within {_TIMEOUT_S:g} s")
                time.sleep(poll_s)
                for key, _ in selector.select(0 if poll_s else 1):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
        finally:
            for stream in streams:
                stream.socket.close()
    return [stream.finish() for stream in streams]


class _Stream:
    """One connection, read as bytes come."""

    def __init__(self, host: str, port: int, body: dict[str, Any]) -> None:
        content = orjson.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        self.socket = socket.create_connection((host, port))
        self._answer = StreamedAnswer(time.perf_counter())
        self._status = b""
        self._rest = b""
        self._last = b""
        self.socket.sendall(head.encode() + content)

    def read(self) -> bool:
        """Take what has come; return whether more will."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            self._answer.finished_at = time.perf_counter()
        lines, _, self._rest = (self._rest + data).rpartition(b"\n" if data else b"}")
        self._status = self._status or lines.split(b"\n", 1)[0]
        num_pieces = lines.count(b'"text":"') - lines.count(b'"text":""')
        if num_pieces:
            self._answer.piece_times += [time.perf_counter()] * num_pieces
        if b"completion_tokens" in lines:
            self._last = lines
        return bool(data)

    def finish(self) -> StreamedAnswer:
        """Return what the stream said, which has ended."""
        if b" 200 " not in self._status:
            raise RequestFailed(f"HTTP answered {self._status.decode(errors='replace').strip()}")
        generated = _GENERATED.search(self._last)
        if generated is None:
            raise RequestFailed("an answer ended without usage")
        answer = self._answer
        answer.num_generated_tokens = int(generated[1])
        if answer.piece_times:
            answer.first_token_at, answer.finished_at = answer.piece_times[0], answer.piece_times[-1]
        return answer
