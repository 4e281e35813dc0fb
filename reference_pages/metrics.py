"""The page of metrics: those of a server with all its instruments, and of the routers.

The server is a real one over a tiny model, in this process: what it tells is what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from reference_pages.markdown import prose, table
from stemma.config.loading import load_settings
from stemma.engine.api import EngineStats
from stemma.engine.async_engine import AsyncEngine
from stemma.model.files.tiny import write_tiny_model
from stemma.server.app import create_app
from stemma.server.observe.tier_metrics import tier_metrics
from stemma_router.models.front import make_front
from stemma_router.models.loaded import Models, Server
from stemma_router.replicas.metrics import gathered
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.relay import Relay, RouteOptions, relay_client
from stemma_router.routing.route import create_route_app
from stemma_router.routing.server_list import FleetServer

_HEAD = """# Metrics

`GET /metrics` answers in Prometheus' text format. A counter `x` is exposed as `x_total`, a histogram as
`x_bucket`, `x_sum` and `x_count`; all times are seconds. Counters begin at 0 when the server starts.
Names with `tier_` are there if there is a tier below the device, those with `ledger_` with `--ledger`.
What to ask them: [observability](../how-to/observability.md#metrics).
"""
_SECTIONS = (
    ("Stemma's names", "stemma_", ("stemma_route_", "stemma_replica_", "stemma_models_")),
    ("The router's", "stemma_route_", " "),
    ("Of several models behind one address", "stemma_models_", " "),
    ("Of replicas on Ray Serve", "stemma_replica_", " "),
    ("vLLM's names (`--metric-aliases vllm`, the default)", "vllm:", " "),
    ("MindIE's names (`--metric-aliases mindie`, and with its dialect)", "", ("stemma_", "vllm:")),
)
_SERVER_URL = "http://localhost:7001"
_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "A stemma is a tree of manuscripts", "max_tokens": 2}),
    ("/v1/completions", {"prompt": "A stemma is a tree of manuscripts", "max_tokens": 2, "seed": 1}),
    ("/v1/completions", {"prompt": []}),
)
"""What is asked before the metrics are read, so that labels are seen: answers, cached and not, a refusal."""


def page() -> str:
    """Return the page: a table for each set of names."""
    families = {family.name: family for family in [*server_families(), *router_families()]}
    parts = [_HEAD]
    for title, prefix, others in _SECTIONS:
        names = sorted(name for name in families if name.startswith(prefix) and not name.startswith(others))
        rows = (_row(families[name]) for name in names)
        parts.append(f"\n## {title}\n\n{table(('name', 'kind', 'labels', 'what'), rows)}")
    return "".join(parts)


def server_families() -> list[Metric]:
    """Return what a server with every instrument tells."""
    with TemporaryDirectory() as folder:
        return asyncio.run(_server_families(Path(folder)))


def router_families() -> list[Metric]:
    """Return what both kinds of routers tell, and an ingress beside what its replicas do."""
    return asyncio.run(_router_families())


async def _server_families(folder: Path) -> list[Metric]:
    model = folder / "tiny"
    write_tiny_model(model)
    flags = {
        "model": model,
        "kv_cache_memory": "1MB",
        "host_cache": "1MB",
        "disk_cache": folder / "disk",
        "ledger": str(folder / "usage.db"),
        "batch_directory": folder / "batches",
        "metric_aliases": "vllm,mindie",
        "num_threads": 1,
    }
    settings = load_settings(environ={}, flags=flags)
    engine = AsyncEngine.from_settings(settings.engine)
    app = create_app(engine, settings)
    try:
        async with app.router.lifespan_context(app):
            found = await _families(app, _REQUESTS)
            return [*found, *_of_transfers(await engine.stats())]
    finally:
        engine.close()


def _never() -> Server:
    raise AssertionError("nobody asks for a model")


def _of_transfers(stats: EngineStats) -> Iterable[Metric]:
    """Return the tiers' metrics with those that a short run on one rank has no values for."""
    assert stats.transfer is not None
    return tier_metrics(replace(stats.transfer, compute_s_per_block=0.0, missing_by_rank={1: 0}))


async def _router_families() -> list[Metric]:
    options = RouteOptions()
    return [
        family
        for app in (
            create_fleet_app([FleetServer(_SERVER_URL, events="tcp://127.0.0.1:1")], options=options),
            create_route_app([_SERVER_URL], ["http://localhost:7002"], options=options),
            make_front(Models({"a": _never}, max_loaded=1), {}, Relay(relay_client(), options), options),
        )
        for family in await _families(app, ())
    ] + list(text_string_to_metric_families(gathered([], "1", {"1": None}).decode()))


async def _families(app: Any, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Metric]:
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path, body in requests:
            await client.post(path, json=body)
        text = (await client.get("/metrics")).text
    found = text_string_to_metric_families(text)
    return [one for one in found if not one.name.endswith("_created")]


def _row(family: Metric) -> tuple[str, str, str, str]:
    skipped = {"le", "model_name", "engine"}
    seen = (label for sample in family.samples for label in sample.labels)
    labels = dict.fromkeys([*getattr(family, "_labelnames", ()), *sorted(set(seen) - skipped)])
    return f"`{family.name}`", family.type, ", ".join(labels), prose(family.documentation)
