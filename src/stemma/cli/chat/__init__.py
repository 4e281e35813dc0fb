"""``stemma chat``: talk to a server, or to a local checkpoint, and see what each turn reuses."""

from stemma.cli.chat.command import command

__all__ = ["command"]
