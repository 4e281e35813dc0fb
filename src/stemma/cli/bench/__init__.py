"""``stemma bench``: drive any OpenAI-compatible server and measure it."""

from stemma.cli.bench.command import command

__all__ = ["command"]
