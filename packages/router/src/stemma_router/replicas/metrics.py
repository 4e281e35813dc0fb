"""`/metrics` of an ingress: its own counters, and those of all replicas, each with its owner's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from stemma_router.routing.metrics import render


def gathered(own: Iterable[Metric], ingress: str, answers: Mapping[str, str | None]) -> bytes:
    """Return all metrics in Prometheus' text format, labelled with `ingress` or `replica`.

    `answers`: what the replicas' own ``/metrics`` said, by name; None: one didn't answer in time.
    """
    families: dict[tuple[str, str], Metric] = {}
    up = GaugeMetricFamily("stemma_replica_up", "Whether a replica told its metrics", labels=["replica"])
    _add(families, own, {"ingress": ingress})
    for name, text in answers.items():
        up.add_metric([name], float(text is not None))
        _add(families, text_string_to_metric_families(text or ""), {"replica": name})
    return render([up], families.values())


def _add(families: dict[tuple[str, str], Metric], more: Iterable[Metric], labels: Mapping[str, str]) -> None:
    for family in more:
        merged = families.setdefault(
            (family.name, family.type), Metric(family.name, family.documentation, family.type)
        )
        merged.samples += [one._replace(labels={**one.labels, **labels}) for one in family.samples]
