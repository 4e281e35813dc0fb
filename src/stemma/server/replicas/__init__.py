"""Replicas on Ray Serve: an ingress with the APIs, and processes that each hold an engine (extra `ray`)."""

import os


def keep_ray_local() -> None:
    """Let a Ray that is started here listen on loopback, and send no statistics. Before Ray is imported."""
    # On Linux Ray otherwise takes the machine's own address, whatever address it is given.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
