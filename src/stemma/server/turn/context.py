"""The objects that every plane works with."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.server.answers.families import AnswerFormat
from stemma.server.answers.logprobs import TokenTexts
from stemma.server.observe.prompt_parts import RecentPrompts
from stemma.server.turn.build import TurnBuilder
from stemma.server.turn.intake import Intake
from stemma.server.turn.run import TurnRunner


@dataclass(frozen=True, slots=True)
class ApiContext:
    """One server's; lives in ``app.state.api``."""

    engine: EngineClient
    settings: Settings
    intake: Intake
    turns: TurnBuilder
    runner: TurnRunner
    recent: RecentPrompts
    answer_format: AnswerFormat
    token_text: TokenTexts


def context_of(request: Request) -> ApiContext:
    """Return what the APIs of the app that serves `request` work with."""
    context: ApiContext = request.app.state.api
    return context
