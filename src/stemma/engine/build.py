"""From settings to a running engine's parts: the one place that knows which class plugs into which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stemma.config.settings import CacheSettings, EngineSettings
from stemma.engine.budget.working_memory import MemoryPlan, plan_memory
from stemma.engine.core.engine import Engine
from stemma.engine.core.overlap import StreamQueue, ThreadQueue, WorkQueue
from stemma.engine.core.request import Limits
from stemma.engine.core.runner import Runner
from stemma.engine.drafts.drafter import make_drafter
from stemma.engine.operator.pool_attachment import PoolAttachment
from stemma.engine.sampling.grammar import GrammarCompiler
from stemma.engine.trace_log import TraceLog
from stemma.errors import ConfigError
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV, num_blocks_for
from stemma.memory.device.sizing import num_device_blocks
from stemma.memory.tiers.opening import open_tiers
from stemma.model.causal_lm import CausalLM
from stemma.model.demo import is_demo, resolve_checkpoint
from stemma.model.loading import Progress, load_model
from stemma.model.tokenizer import Tokenizer
from stemma.native.copying import copy_function
from stemma.native.process_memory import trim_heap
from stemma.prefix.eviction.cost import block_costs
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import KeySpace
from stemma.prefix.radix import RadixIndex
from stemma.supervision import LoggingSupervisor, Supervisor

MAX_TRACE_BLOCK_SIZE = 8
"""Tokens a hash of a recorded trace: fine enough to try smaller blocks on it."""


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
    pool: PoolAttachment | None = None
    """None: the prefix cache is off, and without it there can be no pool."""


def build_engine(
    settings: EngineSettings, progress: Progress | None = None, supervisor: Supervisor | None = None
) -> EngineParts:
    """Load the checkpoint and set up cache and scheduler. Run its steps on the thread that calls this.

    The name ``demo`` stands for the model of `model/demo.py`. `supervisor` learns of errors in the threads
    started here; None: they are logged. Raises ModelError, UnsupportedModel or ConfigError.
    """
    supervisor = supervisor or LoggingSupervisor()
    check_role(settings)
    settings = with_checkpoint(settings, progress)
    model = load_model(settings.model, progress)
    tokenizer = Tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    trim_heap()
    layout = model.layout(settings.cache.block_size)
    memory: MemoryPlan | None = None
    if settings.cache.memory_limit is not None:
        memory = plan_memory(settings.cache.memory_limit, model, settings)
        num_blocks = num_blocks_for(layout, memory.kv_bytes)
    else:
        num_blocks = num_device_blocks(settings.cache, layout, model.device)
    kv = DeviceKV(layout, num_blocks, model.device)
    kv_layout = layout.describe()
    if not settings.cache.share_across_levels:
        kv_layout += f":{model.numeric_path}"
    key_space = KeySpace(model.fingerprint, kv_layout, layout.block_size)
    index = make_index(settings.cache, key_space)
    device = DeviceCopy(kv, copy_function(settings.model.isa))
    lower = None
    if index is not None or settings.role == "decode":
        lower = open_tiers(
            settings.tiers,
            kv,
            key_space,
            eviction=settings.cache.eviction,
            pool=settings.cache.pool,
            role=settings.role,
            device=device,
            supervisor=supervisor,
        )
    cache = PrefixCache(
        kv,
        index,
        key_space,
        policy_name=settings.cache.eviction,
        lower=lower,
        takes_tails=settings.role == "decode",
        block_costs=device_block_costs(settings.cache, kv.num_blocks),
    )
    eos_token_ids = model.eos_token_ids or tokenizer.eos_token_ids
    limits = Limits(eos_token_ids, min(model.max_model_len, cache.capacity_tokens))
    engine = Engine(
        Runner(model, kv, max_batch_tokens=settings.scheduler.max_batch_tokens),
        cache,
        limits,
        settings.scheduler,
        vocab_size=model.vocab_size,
        drafter=make_drafter(settings.speculation, cache.continuation),
        trace_log=open_trace_log(settings.cache, supervisor),
        queue=open_queue(settings, model.device),
        memory=memory,
        grammars=GrammarCompiler(tokenizer.transformers_tokenizer, model.vocab_size, sorted(eos_token_ids)),
    )
    name = settings.model.served_name or settings.model.path.resolve().name
    pool = None if lower is None else PoolAttachment(lower, key_space, layout, settings.role)
    return EngineParts(engine, model, tokenizer, name, device, key_space, pool)


def with_checkpoint(settings: EngineSettings, progress: Progress | None = None) -> EngineSettings:
    """Return the settings with the directory of the demo's model in place of its name. Raises ModelError."""
    if not is_demo(settings.model.path):
        return settings
    if progress is not None:
        progress("preparing the demo's model", 0.0)
    path = resolve_checkpoint(settings.model.path)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})


def check_role(settings: EngineSettings) -> None:
    """Raise ConfigError if prefill and decode apart, or a pool, can't work with the other settings."""
    pool = settings.cache.pool
    if pool is not None and not settings.cache.enable_prefix_cache and settings.role != "decode":
        raise ConfigError("a pool needs the prefix cache; leave enable_prefix_cache on")
    if settings.role == "both":
        return
    if pool is None:
        raise ConfigError(f"role {settings.role} needs a pool to meet the other side in; set --pool")
    if settings.role == "prefill" and pool.write != "write_through":
        raise ConfigError("role prefill publishes every block: pool_write must be write_through")
    if settings.role == "decode" and settings.tiers.prefetch == "best_effort":
        raise ConfigError("role decode waits for the pool: prefetch must not be best_effort")


def open_queue(settings: EngineSettings, device: torch.device) -> WorkQueue | None:
    """Return where steps run that overlap; None where the settings want each in its turn."""
    wanted, is_cuda = settings.scheduler.overlap_schedule, device.type == "cuda"
    if wanted == "off" or (wanted == "auto" and (not is_cuda or settings.speculation.mode != "off")):
        return None
    return StreamQueue(device) if is_cuda else ThreadQueue()


def open_trace_log(settings: CacheSettings, supervisor: Supervisor) -> TraceLog | None:
    """Return the trace that the settings ask for, or None. Raises StorageError."""
    if settings.record_trace is None:
        return None
    return TraceLog(
        settings.record_trace,
        min(settings.block_size, MAX_TRACE_BLOCK_SIZE),
        settings.block_size,
        supervisor=supervisor,
    )


def device_block_costs(settings: CacheSettings, num_blocks: int) -> npt.NDArray[np.float32] | None:
    """Return what the eviction policy is told of the cost of blocks by depth; None if all are equal."""
    if settings.eviction_cost == "blocks":
        return None
    return block_costs(num_blocks, settings.block_size, settings.attention_equal_at)


def make_index(settings: CacheSettings, key_space: KeySpace) -> PrefixIndex | None:
    """Return the index that the settings ask for; None if the prefix cache is off."""
    if not settings.enable_prefix_cache:
        return None
    policy = make_policy(settings.eviction)
    if settings.index == "hash":
        return HashIndex(key_space, policy)
    return RadixIndex(key_space.block_size, policy)
