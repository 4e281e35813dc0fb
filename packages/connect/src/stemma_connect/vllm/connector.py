"""The class that vLLM loads: vLLM's interface on one side, `SchedulerSide` and `WorkerSide` on the other.

Written for vLLM 0.32. vLLM makes one in the scheduler's process and one in the worker's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from stemma.errors import ConfigError
from stemma.supervision import LoggingSupervisor
from stemma.types import Tier
from stemma_connect.settings import ConnectorSettings
from stemma_connect.vllm.blocks import VllmBlocks
from stemma_connect.vllm.cores import on_all_cores
from stemma_connect.vllm.identity import key_space, model_directory, numeric_fields, require_supported
from stemma_connect.vllm.lookup import LookupClient, LookupServer, socket_path
from stemma_connect.vllm.metrics import StemmaPromMetrics, StemmaStats
from stemma_connect.vllm.scheduler import SchedulerSide
from stemma_connect.vllm.work import StepWork
from stemma_connect.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


@dataclass
class StemmaMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The work of one step, as vLLM carries it from process to process."""

    work: StepWork = field(default_factory=StepWork)


class StemmaConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's prefix cache, extended by Stemma's host, disk and pool tiers."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError for settings, models and ways of running that aren't supported."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = ConnectorSettings.parse(
            transfer.kv_connector_extra_config, where="kv_connector_extra_config"
        )
        require_supported(vllm_config)
        self._block_size = _block_size(kv_cache_config)
        self._socket = socket_path(str(transfer.engine_id))
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._server: LookupServer | None = None
        self._client: LookupClient | None = None
        if role is KVConnectorRole.SCHEDULER:  # vLLM made the worker's one before
            self._client = LookupClient(self._socket)
            self._scheduler = SchedulerSide(
                self._client.space(),
                self._client,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing worse."""
        return False

    # -- in the worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the tiers under vLLM's tensors."""
        blocks = VllmBlocks(kv_caches, self._kv_cache_config.num_blocks)
        config = self._vllm_config
        fields = numeric_fields(config, vllm.__version__, next(iter(kv_caches.values())).device)
        model = model_directory(config.model_config.model, config.model_config.revision)
        space = key_space(fields, model, blocks.layout, self._block_size)
        supervisor = LoggingSupervisor()
        with on_all_cores():
            self._worker = WorkerSide(
                self._settings, blocks, space, supervisor, config.scheduler_config.max_num_batched_tokens
            )
            self._server = LookupServer(self._socket, space, self._worker.lookup, supervisor)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: vLLM calls this first."""
        if self._worker is not None:
            self._worker.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads that no step waits for."""
        if self._worker is not None:
            self._worker.start_loads(self._bound())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM schedules a request once its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Copy down what became full."""
        if self._worker is not None:
            self._worker.save(self._bound())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose blocks vLLM may free, and those whose loads have ended."""
        if self._worker is None:
            return None, None
        return self._worker.finished(is_idle=self._bound().num_tokens == 0)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM must compute."""
        return self._worker.take_failed() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> StemmaStats | None:
        """Return what happened since the last call."""
        if self._worker is None:
            return None
        counts = self._worker.take_counts()
        return StemmaStats(data=counts) if counts else None

    # -- in the scheduler -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the tiers have, to be loaded between steps."""
        count = self._planner.num_new_matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that vLLM allocated."""
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return the loaded tokens by tier."""
        found: dict[CacheHitSource, int] = {}
        for tier, count in self._planner.sources(request, num_external_tokens).items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + count
        return found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StemmaMetadata:
        """Return the work of the step."""
        state = scheduler_output.kv_connector_block_state
        started = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        started += scheduler_output.scheduled_cached_reqs.resumed_req_ids
        return StemmaMetadata(
            self._planner.plan_step(
                scheduler_output.num_scheduled_tokens,
                started,
                lambda request_id: state.resolve_block_ids(request_id)[0],
            )
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn which loads failed."""
        if connector_output.invalid_block_ids:
            self._planner.loads_failed(connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Save the last block too, if it is full; vLLM keeps the blocks until then."""
        return self._planner.finished(request, block_ids), None

    def reset_cache(self) -> bool | None:
        """Drop what host and disk hold."""
        return self._planner.clear()

    # -- both -----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Write what is queued and close the tiers."""
        if self._server is not None:
            self._server.close()
        if self._worker is not None:
            self._worker.close()
        if self._client is not None:
            self._client.close()
        self._server = self._worker = self._client = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StemmaStats:
        """Return counts that came from another process."""
        return StemmaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StemmaPromMetrics:
        """Return the counters at vLLM's /metrics."""
        return StemmaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _planner(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM calls this in its scheduler only"
        return self._scheduler

    def _bound(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StemmaMetadata)
        return metadata.work


def _block_size(config: KVCacheConfig) -> int:
    """Return vLLM's tokens per block; raise ConfigError unless all layers are plain attention."""
    groups: Iterable[Any] = config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise ConfigError(
            f"StemmaConnector saves models whose layers all attend to the whole prompt; this keeps {kinds}"
        )
    return int(specs[0].block_size)
