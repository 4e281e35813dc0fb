"""A tiny real checkpoint for every engine test, and engines over it in any configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import TierSettings
from stemma.engine.build import make_index
from stemma.engine.core.engine import Engine
from stemma.engine.core.overlap import ThreadQueue
from stemma.engine.core.request import Limits
from stemma.engine.core.runner import Runner
from stemma.engine.drafts.drafter import make_drafter
from stemma.engine.llm import engine_settings
from stemma.engine.output.output import OutputProcessor
from stemma.engine.sampling.grammar import GrammarCompiler
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.tiers.opening import open_tiers
from stemma.model.causal_lm import CausalLM
from stemma.model.loading import load_model
from stemma.model.tokenizer import Tokenizer
from stemma.prefix.keys import KeySpace
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
        clock: Any = None,
        drafter: Any = None,
        tiers: TierSettings | None = None,
        overlaps: bool = False,
        **fields: Any,
    ) -> Harness:
        settings = engine_settings(checkpoint, **fields)
        layout = model.layout(settings.cache.block_size)
        kv = DeviceKV(layout, num_blocks)
        key_space = KeySpace(model.fingerprint, layout.describe(), layout.block_size)
        options = {} if clock is None else {"clock": clock}
        lower = None
        if tiers is not None or settings.cache.pool is not None:
            pool, role = settings.cache.pool, settings.role
            lower = open_tiers(tiers or settings.tiers, DeviceCopy(kv), key_space, pool=pool, role=role)
        cache = PrefixCache(
            kv,
            make_index(settings.cache, key_space),
            key_space,
            lower=lower,
            takes_tails=settings.role == "decode",
            **options,
        )
        if "speculation" in fields:
            drafter = make_drafter(settings.speculation, cache.continuation)
        limits = Limits(model.eos_token_ids, min(model.max_model_len, cache.capacity_tokens))
        engine = Engine(
            Runner(model, kv, max_batch_tokens=settings.scheduler.max_batch_tokens),
            cache,
            limits,
            settings.scheduler,
            vocab_size=model.vocab_size,
            drafter=drafter,
            queue=ThreadQueue() if overlaps else None,
            grammars=GrammarCompiler(
                tokenizer.transformers_tokenizer, model.vocab_size, sorted(model.eos_token_ids)
            ),
            **options,
        )
        return Harness(engine, OutputProcessor(tokenizer), key_space, lower)

    return make
