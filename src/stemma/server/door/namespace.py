"""The namespace of a tenant: derived from its name and the server's secret, so no client can choose it."""

from __future__ import annotations

import hashlib
import hmac
import struct

from stemma.prefix.keys import Namespace


def tenant_namespace(secret: bytes, tenant: str, asked: Namespace) -> Namespace:
    """Return where the blocks of `tenant` lie. What a client `asked` for narrows that and never leaves it.

    Fields are length-prefixed: no two pairs of tenant and salt give the same bytes.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for field in (tenant.encode(), asked.salt.encode()):
        mac.update(struct.pack("<Q", len(field)))
        mac.update(field)
    return Namespace(salt=f"tenant:{mac.hexdigest()}", adapter=asked.adapter, owner=tenant)
