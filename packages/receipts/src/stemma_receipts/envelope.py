"""DSSE envelopes: a payload, its type, and signatures over both."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stemma_receipts.errors import ReceiptError
from stemma_receipts.keys import key_id

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_MAX_SIGNATURES = 16


def pre_authentication(payload: bytes) -> bytes:
    """Return the bytes that are signed (DSSE's PAE)."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def signed(payload: bytes, key: Ed25519PrivateKey, name: str) -> dict[str, Any]:
    """Return the envelope of a payload; `name` is the key's id."""
    signature = key.sign(pre_authentication(payload))
    return {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": name, "sig": base64.b64encode(signature).decode()}],
    }


def opened(envelope: Mapping[str, Any], key: Ed25519PublicKey) -> bytes:
    """Return the payload of an envelope that `key` signed. Raises ReceiptError."""
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        raise ReceiptError(f"the envelope's payloadType isn't {PAYLOAD_TYPE}")
    payload = _decoded(envelope.get("payload"), "payload")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) > _MAX_SIGNATURES:
        raise ReceiptError("the envelope has no list of signatures")
    content = pre_authentication(payload)
    for one in signatures:
        signature = _decoded(one.get("sig") if isinstance(one, dict) else None, "signatures")
        try:
            key.verify(signature, content)
        except InvalidSignature:
            continue
        return payload
    raise ReceiptError(f"not signed by the key {key_id(key)[:16]}, or changed since")


def _decoded(given: object, where: str) -> bytes:
    if not isinstance(given, str):
        raise ReceiptError(f"the envelope's {where} is no text")
    try:
        return base64.b64decode(given, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ReceiptError(f"the envelope's {where} isn't base64") from error
