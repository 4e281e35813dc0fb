"""From settings to the parts of a running engine: the one place that connects the classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stemma.config.settings import CacheSettings, EngineSettings, LoraSettings, Role
from stemma.engine.adapters import AdapterRegistry
from stemma.engine.budget.warm_up import warm_up
from stemma.engine.budget.working_memory import MemoryPlan, measured_kv_bytes, plan_memory
from stemma.engine.cache_parts import CacheParts, make_cache
from stemma.engine.core.adapter_seats import PreparedAdapters
from stemma.engine.core.engine import Engine
from stemma.engine.core.images import ImageVectors
from stemma.engine.core.overlap import StreamQueue, ThreadQueue, WorkQueue
from stemma.engine.core.prediction import ModelDrafts, PredictingRunner
from stemma.engine.core.request import Limits
from stemma.engine.core.runner import Runner
from stemma.engine.core.scheduler import DraftGuesser
from stemma.engine.drafts.drafter import Drafter, make_drafter
from stemma.engine.operator.pool_attachment import PoolAttachment
from stemma.engine.preflight import check_engine
from stemma.engine.ranks.execution import LeadingDecoder
from stemma.engine.ranks.leader import Ranks
from stemma.engine.ranks.pool import OtherPools
from stemma.engine.ranks.settings import pool_part
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.trace_log import TraceHeader, TraceLog
from stemma.errors import ConfigError
from stemma.guests import load, to_install
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.kv_events import EventPublisher
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.transfer import TierTransfer
from stemma.model.files.directory import is_gguf
from stemma.model.files.gguf_parts import whole_stem
from stemma.model.files.progress import Progress
from stemma.model.load.loading import load_model
from stemma.model.load.located import other_names
from stemma.model.load.plan import LoadPlan
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.decoding import ImageLimits
from stemma.model.vision.reading import ImageReader
from stemma.native.process_memory import trim_heap
from stemma.prefix.keys import KeySpace
from stemma.supervision import LoggingSupervisor, Supervisor

PUBLISHERS = "stemma.publishers"
"""Entry points of what publishes KV events: called as below, it returns a `EventPublisher`."""

MAX_TRACE_BLOCK_SIZE = 4
"""Tokens a hash of a recorded trace: fine enough to try smaller blocks on it."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine, and what its clients need in addition."""

    engine: Engine
    model: CausalLM
    tokenizer: Tokenizer
    model_name: str
    device: DeviceCopy
    """Bytes of device blocks, in and out."""
    key_space: KeySpace
    adapters: AdapterRegistry
    tiers: TierTransfer | None = None
    """This process's tiers below the device; None if the prefix cache is off."""
    pool: PoolAttachment | None = None
    """None: there can be no pool, because the prefix cache is off."""
    kv_events: EventPublisher | None = None
    """Tells others what the cache holds; None: nobody asked for it."""
    num_ranks: int = 1
    also_named: tuple[str, ...] = ()
    """Other names that requests may use for the model."""
    images: ImageReader | None = None
    """Reads images for prompts; None: the model reads text alone."""

    @property
    def own_directory(self) -> Path | None:
        """The disk tier's sub-directory of this model, which this process has locked."""
        stores = () if self.tiers is None else self.tiers.stores
        disk = next((one for one in stores if isinstance(one, DiskStore)), None)
        return None if disk is None or disk.read_only else disk.path


def build_engine(
    settings: EngineSettings,
    progress: Progress | None = None,
    supervisor: Supervisor | None = None,
    plan: LoadPlan | None = None,
) -> EngineParts:
    """Load the checkpoint and set up cache and scheduler. Run its steps on the thread that calls this.

    The name ``demo`` stands for the model of `model/load/demo.py`. `supervisor` learns of errors in the
    threads started here; None: they are logged. `plan`: what was begun of the load before.

    Raises ModelError, UnsupportedModel, ConfigError or StorageError; most of them before any weight is read
    (`preflight.py`).
    """
    supervisor = supervisor or LoggingSupervisor()
    also_named = other_names(settings.model)
    with ExitStack() as header:
        header.enter_context(_header_kept(settings.model.path))
        settings = check_engine(settings, progress)
        if settings.parallel.num_ranks == 1:
            return _build(settings, progress, supervisor, None, also_named, plan, header)
        ranks = Ranks(settings, supervisor)
        with ranks.closing_on_error():
            return _build(ranks.settings, progress, supervisor, ranks, also_named, plan, header)


def _build(
    settings: EngineSettings,
    progress: Progress | None,
    supervisor: Supervisor,
    ranks: Ranks | None,
    also_named: tuple[str, ...],
    plan: LoadPlan | None,
    header: ExitStack,
) -> EngineParts:
    """Build the engine of one process; on several `ranks` this is rank 0, and the settings are its own.

    `header` is closed once the checkpoint is read.
    """
    predicts = settings.speculation.mode == "mtp"
    group = None if ranks is None else ranks.group
    with header, ThreadPoolExecutor(1) as beside:
        reading = beside.submit(
            Tokenizer,
            settings.model.path,
            trust_remote_code=settings.model.trust_remote_code,
            chat_template=settings.model.chat_template,
        )
        model = load_model(settings.model, progress, predicts=predicts, group=group, plan=plan)
        tokenizer = reading.result()
    if ranks is not None:
        model.decoder = LeadingDecoder(model.decoder, ranks)
    trim_heap()
    with accelerator_of(model.device).scope():
        return assemble_engine(
            settings, model, tokenizer, supervisor, ranks=ranks, also_named=also_named, progress=progress
        )


def assemble_engine(
    settings: EngineSettings,
    model: CausalLM,
    tokenizer: Tokenizer,
    supervisor: Supervisor,
    *,
    ranks: Ranks | None = None,
    also_named: tuple[str, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    drafter: DraftGuesser | None = None,
    progress: Progress | None = None,
) -> EngineParts:
    """Set up cache, tiers and scheduler over a model that was loaded as `settings` say.

    `clock` is that of cache and scheduler; `drafter` takes the place of the one that the settings ask for.
    Beside the host, steps of all sizes are run first (`budget/warm_up.py`). Raises ConfigError, StorageError.
    """
    name = settings.model.served_name or served_name(settings.model.path)
    adapters = load_adapters(settings.lora, model, (name, *also_named))
    reader = make_image_reader(settings, model, tokenizer)
    memory: MemoryPlan | None = None
    num_bytes: int | None = None
    if settings.cache.memory_limit is not None:
        memory = plan_memory(settings.cache.memory_limit, model, settings)
        num_bytes = memory.kv_bytes
    is_warmed = model.device.type != "cpu" and ranks is None
    if is_warmed and settings.cache.kv_cache_memory is None:
        num_bytes = measured_kv_bytes(model, settings)
    parts = make_cache(settings, model, num_bytes, supervisor, ranks, clock)
    if is_warmed:
        warm_up(model, parts.kv, settings, progress)
    publisher = open_kv_events(
        settings.cache,
        supervisor,
        () if parts.lower is None else parts.lower.stores,
        has_checkpoints=not parts.cache.is_plain,
    )
    if publisher is not None:
        parts.cache.watch(publisher)
    engine = _make_engine(
        settings, model, tokenizer, parts, supervisor, clock, drafter, memory, _closing(publisher, ranks)
    )
    return EngineParts(
        engine,
        model,
        tokenizer,
        name,
        parts.device,
        parts.key_space,
        adapters,
        parts.tiers,
        open_attachment(parts, settings.role, ranks),
        publisher,
        1 if ranks is None else ranks.share.num_processes,
        also_named,
        reader,
    )


def _make_engine(
    settings: EngineSettings,
    model: CausalLM,
    tokenizer: Tokenizer,
    parts: CacheParts,
    supervisor: Supervisor,
    clock: Callable[[], float],
    drafter: DraftGuesser | None,
    memory: MemoryPlan | None,
    on_close: Callable[[], None],
) -> Engine:
    """Return the scheduler and what runs its steps, over a cache that stands."""
    cache = parts.cache
    own_ends = (token_id for token_id in tokenizer.eos_token_ids if token_id < model.vocab_size)
    eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *own_ends)))
    own_drafter = make_drafter(settings.speculation, cache.continuation)
    runner, model_drafts = make_runner(settings, model, parts.kv, cache, own_drafter)
    return Engine(
        runner,
        cache,
        Limits(eos_token_ids, min(model.max_model_len, cache.capacity_tokens)),
        settings.scheduler,
        vocab_size=model.vocab_size,
        clock=clock,
        drafter=drafter or own_drafter,
        model_drafts=model_drafts,
        trace_log=open_trace_log(settings.cache, supervisor, clock, cache.capacity_tokens),
        queue=open_queue(settings, model.device) if cache.is_plain else None,
        memory=memory,
        grammars=GrammarCompiler(
            tokenizer.transformers_tokenizer,
            model.vocab_size,
            sorted(eos_token_ids),
            settings.model.isa,
            max_bytes=settings.scheduler.grammar_memory,
        ),
        max_adapters=settings.lora.max_loras,
        generates=model.abilities.generates,
        choose=model.choose,
        load_ahead_bandwidth=settings.tiers.load_ahead_bandwidth,
        on_close=on_close,
    )


def make_image_reader(settings: EngineSettings, model: CausalLM, tokenizer: Tokenizer) -> ImageReader | None:
    """Return what reads images for prompts; None for models of text alone. Raises ConfigError, ModelError."""
    if model.encoder is None:
        return None
    if settings.cache.memory_limit is not None:
        raise ConfigError(
            f"memory_limit doesn't go with {model.info.architecture}: what its vision encoder takes isn't "
            "measured; give kv_cache_memory"
        )
    encoder, room = model.encoder.config, settings.scheduler.max_batch_tokens
    num_whole = 0 if encoder.family.num_whole is None else encoder.family.num_whole(encoder.whole)
    if num_whole > room:
        raise ConfigError(
            f"max_batch_tokens is {room}, but {model.info.architecture} computes the {num_whole} tokens of "
            f"an image in one step, since they see each other; give it {num_whole} or more"
        )
    images = settings.images
    limits = ImageLimits(images.max_bytes, images.max_pixels)
    return ImageReader(settings.model.path, model.encoder.config, tokenizer, limits)


def _header_kept(path: Path) -> AbstractContextManager[None]:
    """Return what keeps a GGUF file's header while its parts are read, one after the other."""
    if not is_gguf(path):
        return nullcontext()
    from stemma.model.files.gguf_header import headers_kept

    return headers_kept()


def open_attachment(parts: CacheParts, role: Role, ranks: Ranks | None) -> PoolAttachment | None:
    """Return what attaches pools while the engine runs, on all ranks; None without tiers."""
    if parts.tiers is None:
        return None
    if ranks is None:
        return PoolAttachment(parts.tiers, parts.key_space, parts.layout, role)
    part = pool_part(ranks.share)
    return PoolAttachment(
        parts.tiers, parts.key_space, parts.layout, role, others=OtherPools(ranks), part=part
    )


def _closing(publisher: EventPublisher | None, ranks: Ranks | None) -> Callable[[], None]:
    """Return what is to be closed after the cache."""

    def close() -> None:
        if publisher is not None:
            publisher.close()
        if ranks is not None:
            ranks.close()

    return close


def load_adapters(settings: LoraSettings, model: CausalLM, model_names: Sequence[str]) -> AdapterRegistry:
    """Return the registry with the adapters that the settings name. Raises AdapterError."""
    registry = AdapterRegistry(model.adaptable, settings, model_names)
    for name, path in settings.adapters.items():
        registry.load(name, path)
    return registry


def served_name(path: Path) -> str:
    """Return the model's name in the API: of its directory, or of its file without the ending."""
    return whole_stem(path.resolve()) if is_gguf(path) else path.resolve().name


def make_runner(
    settings: EngineSettings, model: CausalLM, kv: DeviceKV, cache: PrefixCache, drafter: Drafter | None
) -> tuple[Runner, ModelDrafts | None]:
    """Return what runs the steps; and, if the model drafts tokens by itself, what asks it for them."""
    options: dict[str, Any] = {
        "max_batch_tokens": settings.scheduler.max_batch_tokens,
        "adapters": PreparedAdapters(model, settings.lora.max_loras),
        "block_size": settings.cache.block_size,
    }
    if settings.speculation.mode != "mtp" or drafter is None:
        encoder = model.encoder
        images = None if encoder is None else ImageVectors(encoder, settings.images.cache)
        return Runner(model, kv, images=images, **options), None
    runner = PredictingRunner(model, kv, **options)
    return runner, ModelDrafts(runner, drafter, cache)


def open_queue(settings: EngineSettings, device: torch.device) -> WorkQueue | None:
    """Return the queue of overlapping steps; None if steps run in turn.

    With mtp every step needs the host: the model's own layer runs between two steps. Several ranks
    beside the host get the drawn tokens by way of the host, so each step would wait for the one before.
    """
    if settings.speculation.mode == "mtp":
        return None
    accelerator, wanted = accelerator_of(device), settings.scheduler.overlap_schedule
    if settings.parallel.num_ranks > 1 and not accelerator.is_host:
        return None
    # With drafts, steps that draw tokens run in turn, as few as those are; chunks of prompts needn't.
    in_turn = accelerator.is_host or (
        settings.speculation.mode != "off" and settings.model.gpu_path == "modules"
    )
    if wanted == "off" or (wanted == "auto" and in_turn):
        return None
    return ThreadQueue() if accelerator.is_host else StreamQueue(accelerator)


def open_kv_events(
    settings: CacheSettings, supervisor: Supervisor, stores: Sequence[BlockStore], *, has_checkpoints: bool
) -> EventPublisher | None:
    """Return the publisher that the settings ask for, or None. Raises ConfigError.

    Names of blocks on disk are kept in the directory of the disk tier among `stores`. `has_checkpoints`: the
    model's prompts go on from checkpoints alone.
    """
    if settings.kv_events is None:
        return None
    publisher = load(PUBLISHERS)
    if publisher is None:
        raise ConfigError(f"kv_events needs {to_install('stemma-router')}")
    opened: EventPublisher = publisher(
        settings.kv_events,
        settings.kv_events_replay,
        block_size=settings.block_size,
        supervisor=supervisor,
        topic=settings.kv_events_topic,
        names_path=next((one.path / "block-names" for one in stores if isinstance(one, DiskStore)), None),
        has_checkpoints=has_checkpoints,
    )
    return opened


def open_trace_log(
    settings: CacheSettings, supervisor: Supervisor, clock: Callable[[], float], capacity_tokens: int
) -> TraceLog | None:
    """Return the trace that the settings ask for, or None. Raises StorageError."""
    if settings.record_trace is None:
        return None
    block_size = min(settings.block_size, MAX_TRACE_BLOCK_SIZE)
    header = TraceHeader(
        block_size,
        settings.block_size,
        capacity_tokens // block_size,
        settings.eviction,
        time.time() - clock(),
    )
    return TraceLog(settings.record_trace, header, supervisor=supervisor)
