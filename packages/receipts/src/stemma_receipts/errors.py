"""The error of a receipt."""

from __future__ import annotations

from stemma.errors import StemmaError


class ReceiptError(StemmaError):
    """A receipt is broken, or signed by another key; the message says how."""
