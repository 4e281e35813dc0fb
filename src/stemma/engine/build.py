"""From settings to a running engine's parts: the one place that knows which class plugs into which."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.config.settings import CacheSettings, EngineSettings
from stemma.engine.drafts.drafter import make_drafter
from stemma.engine.engine import Engine
from stemma.engine.request import Limits
from stemma.engine.runner import Runner
from stemma.memory.cache import PrefixCache
from stemma.memory.device import DeviceKV
from stemma.memory.device_copy import DeviceCopy
from stemma.memory.sizing import num_device_blocks
from stemma.memory.tiers import open_tiers
from stemma.model.causal_lm import CausalLM
from stemma.model.loading import Progress, load_model
from stemma.model.tokenizer import Tokenizer
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import KeySpace
from stemma.prefix.radix import RadixIndex


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine and what its clients need beside it."""

    engine: Engine
    model: CausalLM
    tokenizer: Tokenizer
    model_name: str
    device: DeviceCopy
    """Bytes of device blocks, in and out."""
    key_space: KeySpace


def build_engine(settings: EngineSettings, progress: Progress | None = None) -> EngineParts:
    """Load the checkpoint and set up cache and scheduler.

    Raises ModelError, UnsupportedModel or ConfigError.
    """
    model = load_model(settings.model, progress)
    tokenizer = Tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    layout = model.layout(settings.cache.block_size)
    kv = DeviceKV(layout, num_device_blocks(settings.cache, layout, model.device), model.device)
    key_space = KeySpace(model.fingerprint, layout.describe(), layout.block_size)
    index = make_index(settings.cache, key_space)
    lower = open_tiers(settings.tiers, kv, key_space, eviction=settings.cache.eviction) if index else None
    cache = PrefixCache(kv, index, key_space, policy_name=settings.cache.eviction, lower=lower)
    limits = Limits(model.eos_token_ids, min(model.max_model_len, cache.capacity_tokens))
    engine = Engine(
        Runner(model, kv, max_batch_tokens=settings.scheduler.max_batch_tokens),
        cache,
        limits,
        settings.scheduler,
        vocab_size=model.vocab_size,
        drafter=make_drafter(settings.speculation, cache.continuation),
    )
    name = settings.model.served_name or settings.model.path.resolve().name
    return EngineParts(engine, model, tokenizer, name, DeviceCopy(kv), key_space)


def make_index(settings: CacheSettings, key_space: KeySpace) -> PrefixIndex | None:
    """Return the index that the settings ask for; None if the prefix cache is off."""
    if not settings.enable_prefix_cache:
        return None
    policy = make_policy(settings.eviction)
    if settings.index == "hash":
        return HashIndex(key_space, policy)
    return RadixIndex(key_space.block_size, policy)
