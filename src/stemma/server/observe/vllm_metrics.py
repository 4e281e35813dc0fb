"""The names that vLLM's dashboards query (its V1 engine's; older names where dashboards still use them)."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from stemma.server.observe.metric_aliases import AliasNames, Source, Values, share
from stemma.types import Tier

_HISTOGRAMS = {
    "stemma_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "stemma_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "stemma_request_seconds": "vllm:e2e_request_latency_seconds",
    "stemma_queue_wait_seconds": "vllm:request_queue_time_seconds",
    "stemma_prefill_seconds": "vllm:request_prefill_time_seconds",
    "stemma_decode_seconds": "vllm:request_decode_time_seconds",
    "stemma_request_prompt_tokens": "vllm:request_prompt_tokens",
    "stemma_request_generated_tokens": "vllm:request_generation_tokens",
}
_REASONS = ("stop", "length", "abort", "error")


def _counters(source: Source) -> Values:
    stats = source.stats
    on_device = stats.cached_tokens_by_tier.get(Tier.DEVICE, 0)
    below = sum(stats.cached_tokens_by_tier.values()) - on_device
    return (
        ("vllm:num_preemptions", "Running requests whose blocks were taken back", stats.num_preemptions),
        ("vllm:prompt_tokens", "Prompt tokens of requests that started", stats.num_prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated", stats.num_generated_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.num_prompt_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens served from the device tier", on_device),
        (
            "vllm:external_prefix_cache_queries",
            "Prompt tokens looked up below the device",
            stats.num_prompt_tokens - on_device,
        ),
        ("vllm:external_prefix_cache_hits", "Prompt tokens served from the tiers below the device", below),
        ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", stats.num_draft_tokens),
        (
            "vllm:spec_decode_num_accepted_tokens",
            "Draft tokens accepted",
            stats.num_accepted_draft_tokens,
        ),
    )


def _gauges(source: Source) -> Values:
    stats = source.stats
    used = 1.0 - share(stats.num_free_blocks, stats.num_blocks)
    text = "Device blocks that hold something, cached ones too"
    return (
        ("vllm:num_requests_running", "Requests in the running batch", stats.num_running),
        ("vllm:num_requests_waiting", "Requests in the queue", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", text, used),
        ("vllm:gpu_cache_usage_perc", text, used),
    )


def _families(source: Source, labels: dict[str, str]) -> Iterable[Metric]:
    success = CounterMetricFamily(
        "vllm:request_success", "Sequences by finish reason", labels=[*labels, "finished_reason"]
    )
    for reason in _REASONS:
        success.add_metric([*labels.values(), reason], source.finished.get(reason, 0.0))
    yield success


VLLM_NAMES = AliasNames(_HISTOGRAMS, _counters, _gauges, _families, {"engine": "0"})
