"""The commands of `stemma` that this package brings, by name: where each is, and its help."""

from __future__ import annotations

COMMANDS = {"certs": ("stemma_mindie.certs:app", "Make certificates to try HTTPS with.")}
