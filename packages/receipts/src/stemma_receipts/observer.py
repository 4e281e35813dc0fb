"""Signs the answers whose clients asked for a receipt."""

from __future__ import annotations

import asyncio
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stemma.server.observe.collected import Collected, TurnObserver
from stemma.server.turn.build import Turn
from stemma.types import FinishReason
from stemma_receipts.envelope import signed
from stemma_receipts.identity import Identity
from stemma_receipts.keys import key_id
from stemma_receipts.statement import opening_of, statement_of

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class Signer:
    """Signs for one server. `identity` is known once all weights have been read."""

    def __init__(self, key: Ed25519PrivateKey, identity: asyncio.Future[Identity]) -> None:
        self._key = key
        self._key_id = key_id(key.public_key())
        self._identity = identity

    def observer(self, turn: Turn) -> TurnObserver | None:
        """Return what signs a turn's answer; None: nobody asked."""
        return _Receiptor(self, turn) if turn.receipt else None

    async def receipt(self, turn: Turn, so_far: Collected) -> dict[str, Any]:
        """Return the receipt of an answer that is whole."""
        identity, request = await asyncio.shield(self._identity), turn.request
        opening = opening_of(request, so_far.sequences)
        is_open = turn.receipt != "hashed"
        statement = statement_of(identity, request, so_far.sequences, opening, is_open=is_open)
        found: dict[str, Any] = {"envelope": signed(statement, self._key, self._key_id)}
        return found if is_open else found | {"opening": opening.values()}


class _Receiptor(TurnObserver):
    def __init__(self, signer: Signer, turn: Turn) -> None:
        self._signer, self._turn = signer, turn

    async def finished(self, so_far: Collected) -> None:
        """Put the receipt into the answer's ``stemma`` object. An answer that was broken off has none."""
        if all(one.finish_reason in _WHOLE for one in so_far.sequences):
            so_far.notes["receipts"] = [await self._signer.receipt(self._turn, so_far)]
