"""Whether a model shall think, and how long: one wish out of the many fields that clients have for it."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.server.schemas.openai import ChatRequest, ThinkingWish

EFFORT_TOKENS = {"minimal": 512, "low": 2048, "medium": 8192}
"""Budgets of efforts, for models whose template doesn't know these words; higher ones have no limit."""
VARIABLES = ("enable_thinking", "thinking")
"""Names under which templates know whether to think."""
_BUDGETS = (
    "thinking_token_budget",
    "max_reasoning_tokens",
    "thinking_budget_tokens",
    "reasoning_budget",
    "thinking_budget",
)


@dataclass(frozen=True, slots=True)
class WantedThinking:
    """What a request wants."""

    wanted: bool | None
    """None: as the template does by itself."""
    effort: str | None
    max_tokens: int | None
    """Tokens behind which its end is forced; None: no limit."""


def thinking_of(body: ChatRequest) -> WantedThinking:
    """Return what `body` wants. The first field that is given counts."""
    wish = body.thinking if isinstance(body.thinking, ThinkingWish) else None
    reasoning = body.reasoning
    effort = body.reasoning_effort or (None if reasoning is None else reasoning.effort)
    budgets = [getattr(body, name) for name in _BUDGETS]
    budgets += [
        None if wish is None else wish.budget_tokens,
        None if reasoning is None else reasoning.max_tokens,
    ]
    budget = next((one for one in budgets if one is not None), None)
    said = [
        body.enable_thinking,
        body.thinking if isinstance(body.thinking, bool) else None,
        None if wish is None or wish.type is None else wish.type != "disabled",
        None if reasoning is None else reasoning.enabled,
        False if effort == "none" or budget == 0 else None,
    ]
    wanted = next((one for one in said if one is not None), None)
    return WantedThinking(
        wanted, None if effort == "none" else effort, None if budget is None or budget < 0 else budget
    )


def thinking_budget(body: ChatRequest, *, template_knows_effort: bool) -> int | None:
    """Return the tokens of thinking behind which its end is forced; None: no limit."""
    wish = thinking_of(body)
    if wish.max_tokens is not None or template_knows_effort:
        return wish.max_tokens
    return EFFORT_TOKENS.get(wish.effort or "")
