"""The commands of `stemma` for receipts, by name: where each is, and its help."""

from __future__ import annotations

COMMANDS = {
    "verify": (
        "stemma_receipts.commands.verify:command",
        "Compute the answers of receipts again, and say whether they are the same.",
    ),
    "receipts-key": (
        "stemma_receipts.commands.receipts_key:command",
        "Make a key that signs receipts, and its public key.",
    ),
}
