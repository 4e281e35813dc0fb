"""Prefill and decode engines on this machine, started from a cluster file, and the proxy in front of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import yaml
from rich.console import Console

from stemma.cli.server_process import ServerProcess
from stemma.config.loading import tables_of
from stemma.config.settings import PoolSettings, Settings
from stemma.errors import ConfigError
from stemma.server.door.access import Access
from stemma_router.cluster_file import ClusterFile
from stemma_router.commands.route import end_by_exception, serve_proxy
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.route import ServerGroup, create_groups_app

Side = Literal["prefill", "decode"]


def run_prefill_decode(cluster: ClusterFile) -> None:
    """Start the engines, serve the proxy until a signal, end the engines. Raises StemmaError."""
    server = cluster.settings.server
    console = Console(soft_wrap=True, highlight=False)
    end_by_exception()
    logs = _log_dir(cluster)
    console.print(f"the engines' logs are in {logs}")
    with _engines(cluster, logs) as groups:
        for number, (prefills, decodes) in enumerate(groups):
            console.print(f"pool {number}: prefill {', '.join(prefills)}; decode {', '.join(decodes)}")
        options = RouteOptions(
            server.host, server.max_body_bytes, Access(server).admin_key, answer_memory=server.answer_memory
        )
        serve_proxy(create_groups_app(groups, options=options), server)


def _log_dir(cluster: ClusterFile) -> Path:
    """Return the directory for logs; it is there. Raises ConfigError."""
    given = None if cluster.prefill_decode is None else cluster.prefill_decode.log_dir
    if given is None:
        return Path(tempfile.mkdtemp(prefix="stemma-logs-"))
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_dir: {error}") from error
    return given


@contextmanager
def _engines(cluster: ClusterFile, logs: Path) -> Iterator[list[ServerGroup]]:
    """Start all engines at once; yield their addresses by pool; end them."""
    plan = cluster.prefill_decode
    if plan is None:
        raise ConfigError("this file has no prefill_decode: `stemma cluster deploy` starts replicas")
    engine_ranks: list[tuple[Side, int]] = [("prefill", rank) for rank in range(plan.num_prefill)]
    engine_ranks += [("decode", rank) for rank in range(plan.num_decode)]
    num_processes = len(engine_ranks) * cluster.settings.engine.parallel.num_ranks
    share = max(1, (os.cpu_count() or 1) // num_processes)
    with tempfile.TemporaryDirectory(prefix="stemma-cluster-") as folder:
        engines = []
        for side, rank in engine_ranks:
            pool = plan.pools[rank % len(plan.pools)]
            has_cache = side == "prefill" or plan.decode_cache
            file = Path(folder) / f"{side}-{rank}.yaml"
            settings = _settings_of(cluster.settings, side, pool, has_cache=has_cache, num_threads=share)
            file.touch(mode=0o600)  # it may hold keys
            file.write_text(yaml.safe_dump(tables_of(settings)), encoding="utf-8")
            log = logs / f"{side}-{rank}.log"
            engines.append(ServerProcess(settings.engine.model.path, ("--config", str(file)), log))
        with ThreadPoolExecutor(len(engines)) as threads:
            try:
                list(threads.map(ServerProcess.start, engines))
                yield _groups(engines, engine_ranks, len(plan.pools))
            finally:
                list(threads.map(_stop, engines))


def _settings_of(
    settings: Settings, side: Side, pool: PoolSettings, *, has_cache: bool, num_threads: int
) -> Settings:
    """Return one engine's own settings: its side, its pool, a free port on loopback."""
    engine, server = settings.engine, settings.server
    model = engine.model
    if model.num_threads is None:
        model = model.model_copy(update={"num_threads": num_threads})
    is_cached = engine.cache.enable_prefix_cache and has_cache
    cache = engine.cache.model_copy(update={"pool": pool, "enable_prefix_cache": is_cached})
    return settings.model_copy(
        update={
            "engine": engine.model_copy(update={"model": model, "role": side, "cache": cache}),
            "server": server.model_copy(update={"host": "127.0.0.1", "port": 0}),
        }
    )


def _groups(
    engines: list[ServerProcess], engine_ranks: list[tuple[Side, int]], num_pools: int
) -> list[ServerGroup]:
    def of(side: Side, pool: int) -> list[str]:
        both = zip(engines, engine_ranks, strict=True)
        return [one.url for one, (its_side, rank) in both if its_side == side and rank % num_pools == pool]

    return [(of("prefill", pool), of("decode", pool)) for pool in range(num_pools)]


def _stop(engine: ServerProcess) -> None:
    if engine.url:  # it has started
        engine.stop()
