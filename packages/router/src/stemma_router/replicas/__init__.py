"""Replicas on Ray Serve: an ingress with the APIs, and processes that each hold an engine (extra `ray`)."""

import os

from stemma.errors import ConfigError

_AUTH_MODE = "RAY_AUTH_MODE"


def keep_ray_local() -> None:
    """Let a Ray that is started here listen on loopback, ask for a token, and kill what hangs.

    It sends no statistics. Before Ray is imported.
    """
    # On Linux Ray otherwise takes the machine's own address, whatever address it is given.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(_AUTH_MODE, "token")
    # A replica that answers no check is killed, not asked to end: its successor waits for its disk directory.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")


def send_rays_token() -> None:
    """Let connections to a Ray that runs already carry its token. Before Ray is imported.

    Raises ConfigError if the environment forbids that.
    """
    mode = os.environ.setdefault(_AUTH_MODE, "token")
    if mode.lower() == "disabled":
        raise ConfigError(f"{_AUTH_MODE}={mode}: unset it, or give --insecure on a network of your own")
