"""``stemma doctor``: what a bug report needs to know about this machine and its settings."""

from stemma.cli.doctor.command import command

__all__ = ["command"]
