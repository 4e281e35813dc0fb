"""Which settings don't work together: one table, read before anything is loaded.

`docs/project/compatibility.md` shows it with the messages; `tests/engine/test_combinations.py` tries its
cells. What only the checkpoint can show (an adapter for other layers, an architecture whose state can't be
cached) is refused where it is read, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stemma.config.settings import EngineSettings, ParallelSettings
from stemma.errors import ConfigError
from stemma.prefix.eviction.registry import make_policy


@dataclass(frozen=True, slots=True)
class Refused:
    """A combination that isn't served."""

    applies: Callable[[EngineSettings, str], bool]
    """Given the settings and the type of the device, e.g. ``cpu``."""
    message: str
    """Advice to the user; ``{role}``, ``{kv}``, ``{layout}``, ``{quantize}``, ``{ranks}`` and
    ``{block_size}`` stand for settings."""


REFUSED: tuple[Refused, ...] = (
    Refused(
        lambda s, _device: (
            s.cache.pool is not None and not s.cache.enable_prefix_cache and s.role != "decode"
        ),
        "a pool needs the prefix cache; leave enable_prefix_cache on",
    ),
    Refused(
        lambda s, _device: s.role != "both" and s.cache.pool is None,
        "role {role} needs a pool to meet the other side in; set --pool",
    ),
    Refused(
        lambda s, _device: (
            s.role == "prefill" and s.cache.pool is not None and s.cache.pool.write != "write_through"
        ),
        "role prefill publishes every block: pool_write must be write_through",
    ),
    Refused(
        lambda s, _device: s.role == "decode" and s.tiers.prefetch == "best_effort",
        "role decode waits for the pool: prefetch must not be best_effort",
    ),
    Refused(
        lambda s, device: (
            s.cache.kv_cache_dtype != "auto" and device != "cpu" and s.model.gpu_path != "fused"
        ),
        "kv_cache_dtype {kv} on CUDA needs gpu_path fused, whose kernels read codes; set it, or leave "
        "kv_cache_dtype auto",
    ),
    Refused(
        lambda s, device: s.cache.kv_layout != "rows" and device != "cpu",
        "kv_layout {layout} runs on CPU only: the kernels for CUDA read whole rows; leave kv_layout rows",
    ),
    Refused(
        lambda s, device: s.speculation.mode == "mtp" and device != "cpu",
        "speculation is mtp, which runs on CPU only; take another speculation, e.g. auto",
    ),
    Refused(
        lambda s, device: s.model.quantize != "none" and device != "cpu",
        "quantize {quantize} runs on CPU only: the products of CUDA take weights in the model's dtype; leave "
        "quantize none",
    ),
    Refused(
        lambda s, _device: s.cache.block_size % s.parallel.context_parallel_size != 0,
        "{ranks} doesn't go with block_size {block_size}: each rank holds as many tokens of a block; choose "
        "a multiple of context_parallel_size",
    ),
    Refused(
        lambda s, _device: s.parallel.num_ranks > 1 and s.cache.memory_limit is not None,
        "{ranks} doesn't go with memory_limit, which measures one process; give "
        "kv_cache_memory, the bytes of each rank",
    ),
    Refused(
        lambda s, _device: s.parallel.num_ranks > 1 and bool(s.lora.adapters),
        "{ranks} doesn't go with adapters, which aren't cut for ranks; leave lora out",
    ),
    Refused(
        lambda s, _device: s.parallel.num_ranks > 1 and s.speculation.mode == "mtp",
        "{ranks} doesn't go with speculation mtp, whose layer isn't cut for ranks; take "
        "another speculation, e.g. auto",
    ),
    Refused(
        lambda s, device: (
            s.parallel.num_ranks > 1 and s.scheduler.overlap_schedule == "on" and device != "cpu"
        ),
        "{ranks} with overlap_schedule on runs on CPU only: ranks get drawn tokens by way of the host; leave "
        "it auto",
    ),
)
"""The first that applies is reported. A new one needs a line in the document and a case in the test."""


def check_combinations(settings: EngineSettings, device: str) -> None:
    """Raise ConfigError if settings contradict each other, or name parts that can't serve (together).

    `device`: the type that the model runs on, e.g. ``cpu``.
    """
    make_policy(settings.cache.eviction)  # refused here, not after minutes of loading
    for refused in REFUSED:
        if refused.applies(settings, device):
            raise ConfigError(
                refused.message.format(
                    role=settings.role,
                    kv=settings.cache.kv_cache_dtype,
                    layout=settings.cache.kv_layout,
                    quantize=settings.model.quantize,
                    ranks=_ranks_of(settings.parallel),
                    block_size=settings.cache.block_size,
                )
            )


def _ranks_of(parallel: ParallelSettings) -> str:
    """Return the settings that ask for several ranks, with their values."""
    sizes = {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
    }
    return " and ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
