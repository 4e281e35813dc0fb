"""The names that MindIE's dashboards query."""

from __future__ import annotations

from stemma.server.observe.metric_aliases import AliasNames, Source, Values, share
from stemma.types import Tier

_HISTOGRAMS = {
    "stemma_time_to_first_token_seconds": "time_to_first_token_seconds",
    "stemma_time_per_output_token_seconds": "time_per_output_token_seconds",
    "stemma_request_seconds": "e2e_request_latency_seconds",
    "stemma_request_prompt_tokens": "request_prompt_tokens",
    "stemma_request_generated_tokens": "request_generation_tokens",
}


def _counters(source: Source) -> Values:
    stats, ended = source.stats, source.ended
    failed = sum(count for outcome, count in ended.items() if outcome != "ok")
    received = sum(ended.values()) + stats.num_running + stats.num_waiting
    return (
        ("request_received", "Requests that came", received),
        ("request_success", "Requests that ended well", ended.get("ok", 0.0)),
        ("request_failed", "Requests that were refused, aborted or failed", failed),
        ("num_preemptions", "Running requests whose blocks were taken back", stats.num_preemptions),
        ("prompt_tokens", "Prompt tokens of requests that started", stats.num_prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.num_generated_tokens),
    )


def _gauges(source: Source) -> Values:
    stats, ended = source.stats, source.ended
    failed = sum(count for outcome, count in ended.items() if outcome != "ok")
    on_device = stats.cached_tokens_by_tier.get(Tier.DEVICE, 0)
    host = None if stats.transfer is None else stats.transfer.tiers.get(Tier.HOST)
    host_share = 0.0
    if host is not None and host.capacity_blocks:
        host_share = (host.num_blocks or 0) / host.capacity_blocks
    return (
        ("num_requests_running", "Requests in the running batch", stats.num_running),
        ("num_requests_waiting", "Requests in the queue", stats.num_waiting),
        ("num_requests_swapped", "Always 0: blocks stay in the prefix cache", 0),
        ("avg_prompt_throughput_toks_per_s", "Prompt tokens a second since the last scrape", source.rates[0]),
        ("avg_generation_throughput_toks_per_s", "Tokens generated a second, since then", source.rates[1]),
        ("failed_request_perc", "Failed requests as a share of all", share(failed, sum(ended.values()))),
        (
            "npu_cache_usage_perc",
            "Device blocks that hold something, cached ones too",
            1.0 - share(stats.num_free_blocks, stats.num_blocks),
        ),
        ("cpu_cache_usage_perc", "Host blocks that hold something", host_share),
        (
            "npu_prefix_cache_hit_rate",
            "Prompt tokens served from the device tier, as a share of all",
            share(on_device, stats.num_prompt_tokens),
        ),
        ("all_radix_match_num", "Prompt tokens looked up", stats.num_prompt_tokens),
        ("npu_radix_match_hit_num", "Prompt tokens served from the device tier", on_device),
    )


MINDIE_NAMES = AliasNames(_HISTOGRAMS, _counters, _gauges)
