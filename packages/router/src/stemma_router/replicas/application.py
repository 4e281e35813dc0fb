"""The Ray Serve application: an ingress and its replicas; starting it, and Ray if there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig

from stemma.engine.preflight import with_checkpoint
from stemma.errors import ConfigError
from stemma.server.door.access import Access
from stemma_router.cluster.serve_router import KVEventRouter
from stemma_router.cluster_file import ClusterFile, Replicas, read_cluster_file
from stemma_router.replicas.authentication import check_authentication
from stemma_router.replicas.ingress import Ingress
from stemma_router.replicas.replica import Replica

NAME = "stemma"
REPLICAS = "replicas"
INGRESS = "ingress"
_MAX_ONGOING = 100_000
"""Requests that Serve lets through: the engines' own limits decide."""
_CHECK_EVERY_S = 2.0
_CHECK_TIMEOUT_S = 5.0
"""Ray Serve replaces what has answered three checks in a row not in time, or not at all."""


def check_cluster(cluster: ClusterFile) -> ClusterFile:
    """Return the cluster as its processes get it. Raises ConfigError for what replicas can't have."""
    settings, replicas = cluster.settings, cluster.replicas
    if replicas is None:
        raise ConfigError("this file has no replicas: start it with `stemma cluster up`")
    engine = settings.engine
    refused = {
        "role": engine.role != "both",
        "tls_cert": settings.tls.cert is not None,
        "management_port": settings.planes.management_port is not None,
        "metrics_port": settings.planes.metrics_port is not None,
        "kv_events": engine.cache.kv_events is not None,
        "record_trace": engine.cache.record_trace is not None,
        "ledger": settings.server.ledger is not None,
        "tensor_parallel_size": engine.parallel.tensor_parallel_size > 1,
        "context_parallel_size": engine.parallel.context_parallel_size > 1,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ConfigError(f"replicas can't have the setting {name}: docs/how-to/fleet.md, Replicas")
    Access(settings.server)
    engine = with_checkpoint(engine)
    if engine.model.num_threads is None:
        share = max(1, (os.cpu_count() or 1) // replicas.at_most)
        model = engine.model.model_copy(update={"num_threads": share})
        engine = engine.model_copy(update={"model": model})
    return cluster.model_copy(update={"settings": settings.model_copy(update={"engine": engine})})


def start_ray(replicas: Replicas, *, insecure: bool = False) -> None:
    """Connect to the Ray that the file names, or start one without a dashboard (see `keep_ray_local`).

    Raises ConfigError if the Ray that runs already has no token of ours, or asks for none and `insecure` is
    false.
    """
    address = replicas.ray.address
    if address is not None:
        is_told = ":" in address and "//" not in address
        if is_told and not insecure:
            check_authentication(address)  # first: a Ray that asks for no token gets none
        try:
            ray.init(address=address, log_to_driver=False)
        except (ray.exceptions.AuthenticationError, ConnectionError) as error:
            raise ConfigError(f"Ray at {address}: {error}") from error
        if not is_told and not insecure:
            check_authentication(ray.get_runtime_context().gcs_address)
        return
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=replicas.ray.object_store,
        log_to_driver=False,
    )


def deploy(cluster: ClusterFile, router: RequestRouterConfig | None = None) -> Any:
    """Start the application, or replace it replica by replica; return once it takes requests.

    `router` takes the place of the file's.
    """
    server = cluster.settings.server
    assert cluster.replicas is not None
    is_ours = cluster.replicas.ray.address is None
    serve.start(
        proxy_location="HeadOnly" if is_ours else "EveryNode",
        http_options=HTTPOptions(host=server.host, port=server.port),
    )
    return serve.run(application(cluster, router), name=NAME, route_prefix="/")


def from_file(args: dict[str, Any]) -> Any:
    """Return the application that a cluster file describes, for Ray Serve's own configuration: ``file``.

    Raises ConfigError; also where Ray asks for no token, unless the argument ``insecure`` is true.
    """
    if not {"file"} <= set(args) <= {"file", "insecure"}:
        raise ConfigError("the application takes the arguments file, the cluster file, and insecure: true")
    if args.get("insecure") is not True:
        check_authentication(ray.get_runtime_context().gcs_address)
    return application(check_cluster(read_cluster_file(Path(args["file"]), os.environ)))


def stop(cluster: ClusterFile) -> None:
    """End what was started here: application and Ray, or only the connection to a Ray that others started."""
    if cluster.replicas is not None and cluster.replicas.ray.address is None:
        serve.shutdown()
    ray.shutdown()


def application(cluster: ClusterFile, router: RequestRouterConfig | None = None) -> Any:
    """Return the application as `serve.run` takes it; see `deploy`."""
    replicas = cluster.replicas
    assert replicas is not None
    autoscaling = replicas.autoscaling
    scale: dict[str, Any] = {"num_replicas": replicas.count}
    if autoscaling is not None:
        scale = {"autoscaling_config": autoscaling.model_dump(exclude_none=True)}
    options: dict[str, Any] = {}
    if router is None and replicas.router != "power-of-two":
        router = RequestRouterConfig(
            request_router_class=KVEventRouter, request_router_kwargs={"router": replicas.router}
        )
    if router is not None:
        options["request_router_config"] = router
    engines = serve.deployment(
        Replica,
        name=REPLICAS,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=replicas.ray.graceful_shutdown_s,
        health_check_period_s=_CHECK_EVERY_S,
        health_check_timeout_s=_CHECK_TIMEOUT_S,
        ray_actor_options={
            "num_cpus": replicas.ray.cpus_per_replica,
            "num_gpus": replicas.ray.gpus_per_replica,
        },
        **scale,
        **options,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        num_replicas=replicas.num_ingress,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=replicas.ray.graceful_shutdown_s,  # streams go through it
        health_check_period_s=_CHECK_EVERY_S,
        health_check_timeout_s=_CHECK_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(engines.bind(cluster), cluster)
