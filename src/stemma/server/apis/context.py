"""The objects that every API works with."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from stemma.config.settings import Settings
from stemma.engine.client import EngineClient
from stemma.server.answers.families import AnswerFormat
from stemma.server.answers.logprobs import TextOf
from stemma.server.generation import RequestRunner
from stemma.server.requests.intake import Intake


@dataclass(frozen=True, slots=True)
class ApiContext:
    """One server's; lives in ``app.state.api``."""

    engine: EngineClient
    settings: Settings
    intake: Intake
    runner: RequestRunner
    answer_format: AnswerFormat
    token_text: TextOf


def context_of(request: Request) -> ApiContext:
    """Return what the APIs of the app that serves `request` work with."""
    context: ApiContext = request.app.state.api
    return context
