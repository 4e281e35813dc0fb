"""What goes to a client: large bodies piece by piece, so that whoever sends knows what has left."""

from __future__ import annotations

from starlette.types import Message, Send

PIECE_BYTES = 64 * 1024
"""Of a body, between two waits for the client to have read."""


async def send_in_pieces(send: Send, message: Message) -> None:
    """Send `message`; return once all of its body but the last piece has left or the client is gone."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        await send(message)
        return
    last = (len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({**message, "body": body[last:]})
