"""The line that a server prints once it takes requests, for people and for programs that wait for it."""

from __future__ import annotations

READY = "Ready:"
"""Begins the line; the URL follows."""


def ready_line(url: str, hint: str) -> str:
    """Return the line as rich prints it; `hint` says how the server ends."""
    return f"[bold green]{READY}[/] {url}  [dim]({hint})[/]"
