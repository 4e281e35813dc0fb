"""``stemma demo``: the prefix cache at work on a small model, in under a minute."""

from stemma.cli.demo.command import command

__all__ = ["command"]
