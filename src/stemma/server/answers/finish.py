"""Why a sequence ended, in the words of TGI and MindIE."""

from __future__ import annotations

from stemma.types import FinishReason


def finish_reason(reason: FinishReason | None, stop_reason: str | int | None) -> str:
    """Return ``eos_token``, ``stop_sequence``, ``length`` or what went wrong."""
    if reason is FinishReason.STOP:
        return "eos_token" if stop_reason is None else "stop_sequence"
    return str(reason or FinishReason.ERROR)
