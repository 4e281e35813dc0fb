"""A tiny real checkpoint for every engine test, and engines over it in any configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import TierSettings
from stemma.engine.build import assemble_engine
from stemma.engine.core.scheduler import DraftGuesser
from stemma.engine.llm import engine_settings
from stemma.engine.output.output import OutputProcessor
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer
from stemma.supervision import LoggingSupervisor
from tests.checkpoints import build
from tests.engine.harness import Harness


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> CausalLM:
    return load_model(engine_settings(checkpoint).model)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="session")
def harness(checkpoint: Path, model: CausalLM, tokenizer: Tokenizer) -> Callable[..., Harness]:
    """Return a maker of engines: ``harness(num_blocks=8, block_size=16, max_batch_tokens=64, ...)``."""

    def make(
        *,
        num_blocks: int = 64,
        clock: Callable[[], float] = time.monotonic,
        drafter: DraftGuesser | None = None,
        tiers: TierSettings | None = None,
        overlaps: bool = False,
        **fields: Any,
    ) -> Harness:
        fields = {"speculation": "off", "overlap_schedule": "on" if overlaps else "off"} | fields
        asked = engine_settings(checkpoint, **fields)
        block_bytes = model.layout(asked.cache.block_size).block_bytes
        cache = asked.cache.model_copy(update={"kv_cache_memory": num_blocks * block_bytes})
        settings = asked.model_copy(update={"cache": cache, "tiers": tiers or asked.tiers})
        parts = assemble_engine(settings, model, tokenizer, LoggingSupervisor(), clock=clock, drafter=drafter)
        return Harness(parts.engine, OutputProcessor(tokenizer), parts.key_space, parts.tiers)

    return make
