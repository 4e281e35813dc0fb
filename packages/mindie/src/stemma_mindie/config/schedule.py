"""``ScheduleConfig`` and ``LogConfig``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from stemma_mindie.config.base import OWN_SCHEDULER, MindIESection, joint_key, key, no_effect

_OBSOLETE = "obsolete: `plugin_params` with prefix_cache turns the cache on"
_SPLITFUSE = "prefill is always cut into pieces beside decode"


class ScheduleConfig(MindIESection):
    """How waiting requests become steps. Stands in `BackendConfig` or at the top of the file."""

    section: ClassVar[str] = "ScheduleConfig"

    template_type: Literal["Standard", "Mix"] = no_effect("Standard", _SPLITFUSE)
    template_name: str = no_effect("Standard_LLM", "there is one scheduler")
    cache_block_size: int = key(128, "block_size", ge=1, le=128)
    """Tokens a block; a multiple of 16."""
    max_prefill_batch_size: int = no_effect(50, OWN_SCHEDULER, ge=0)
    max_prefill_tokens: int = key(8192, "max_batch_tokens", ge=1, le=4194304)
    """Tokens a step. With `splitfuse`, `splitChunkTokens` is."""
    prefill_time_ms_per_req: int = no_effect(150, OWN_SCHEDULER, ge=0, le=1000)
    prefill_policy_type: int = key(0, "order", means=lambda _: "fcfs", ge=0, le=7)
    """0: first come, first served. Others are taken as 0."""
    decode_time_ms_per_req: int = no_effect(50, OWN_SCHEDULER, ge=0, le=1000)
    decode_policy_type: int = no_effect(0, "all running sequences decode in each step", ge=0, le=7)
    max_batch_size: int = key(200, "max_num_seqs", ge=1, le=819200)
    """Sequences running at once."""
    max_iter_times: int = key(512, "max_output_tokens", ge=1)
    """Tokens of an output; also what a request gets that names no number."""
    max_preempt_count: int = no_effect(0, "blocks of preempted requests stay in the prefix cache", ge=0)
    support_select_batch: bool = no_effect(False, OWN_SCHEDULER)
    max_queue_delay_microseconds: int = no_effect(5000, OWN_SCHEDULER, ge=500, le=1_000_000)
    max_first_token_wait_time: int = no_effect(2500, OWN_SCHEDULER, ge=0, le=3_600_000)
    max_n: int = key(128, "max_n", ge=1, le=8192)
    """Largest `n` and `best_of`."""
    enable_prefix_cache: Any = no_effect(None, _OBSOLETE)
    enable_split: Any = no_effect(None, _SPLITFUSE)
    policy_type: Any = no_effect(None, _SPLITFUSE)
    split_type: Any = no_effect(None, _SPLITFUSE)
    split_start_type: Any = no_effect(None, _SPLITFUSE)
    split_chunk_tokens: int = joint_key(512, "max_batch_tokens", ge=1, le=8192)
    """With `splitfuse`: tokens a step."""
    split_start_batch_size: Any = no_effect(None, _SPLITFUSE)
    stage_select_policy: Any = no_effect(None, OWN_SCHEDULER)
    dynamic_batch_size_enable: Any = no_effect(None, OWN_SCHEDULER)
    buffer_response_enabled: Any = no_effect(None, OWN_SCHEDULER)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cache_block_size % 16:
            raise ValueError(f"cacheBlockSize must be a multiple of 16, got {self.cache_block_size}")
        for name, value in (
            ("maxPrefillBatchSize", self.max_prefill_batch_size),
            ("maxPreemptCount", self.max_preempt_count),
        ):
            given = {"maxPrefillBatchSize": "max_prefill_batch_size"}.get(name, "max_preempt_count")
            if given in self.model_fields_set and value > self.max_batch_size:
                raise ValueError(f"{name} {value} is more than maxBatchSize {self.max_batch_size}")
        return self


class LogConfig(MindIESection):
    """Log level at run time."""

    section: ClassVar[str] = "LogConfig"

    dynamic_log_level: str = no_effect("", "the level of the log doesn't change while the server runs")
    dynamic_log_level_valid_hours: int = no_effect(2, "see dynamicLogLevel", ge=1, le=168)
    dynamic_log_level_valid_time: str = no_effect("", "see dynamicLogLevel")
