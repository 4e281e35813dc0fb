"""Requests to an `AsyncEngine`, and all that it answers."""

from __future__ import annotations

import numpy as np

from stemma.engine.api import GenerationRequest
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.sampling.params import SamplingParams
from tests.engine.harness import greedy


def request(name: str, tokens: np.ndarray, params: SamplingParams | None = None) -> GenerationRequest:
    return GenerationRequest(name, tokens, params or greedy(6))


async def collect(engine: AsyncEngine, req: GenerationRequest) -> list:
    return [output async for output in engine.generate(req)]
