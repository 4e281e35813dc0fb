"""Lines that known clients put into a prompt for their own vendor, new in each session.

Nothing behind such a line could be shared between two sessions, and no model can do anything with it
(`--strip-client-nonces`).
"""

from __future__ import annotations

NONCES = ("x-anthropic-billing-header:",)
"""What such a line begins with."""


def without_nonces(text: str) -> str:
    """Return the text of a system message without such lines at its beginning."""
    while text.startswith(NONCES):
        text = text.partition("\n")[2].lstrip("\n")
    return text
