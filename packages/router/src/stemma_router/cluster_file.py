"""The cluster file: several engines of one model, started together (docs/how-to/fleet.md).

YAML. `settings` is what a server's own file would hold (`loading.py`), for every engine; unknown keys are
errors everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from stemma.config.base import SettingsModel
from stemma.config.loading import load_settings, read_yaml
from stemma.config.settings import PoolSettings, Settings
from stemma.errors import ConfigError

RouterName = Literal[
    "cache-aware", "rendezvous", "least-loaded", "round-robin", "prefix-affinity", "power-of-two"
]


class Autoscaling(SettingsModel):
    """Ray Serve's `autoscaling_config`: how many replicas run, by requests under way."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    initial_replicas: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float = Field(default=8.0, gt=0.0)
    """Requests that each replica should have under way on average."""
    upscale_delay_s: float = Field(default=30.0, ge=0.0)
    downscale_delay_s: float = Field(default=600.0, ge=0.0)
    metrics_interval_s: float = Field(default=10.0, gt=0.0)
    look_back_period_s: float = Field(default=30.0, gt=0.0)
    upscaling_factor: float | None = Field(default=None, gt=0.0)
    downscaling_factor: float | None = Field(default=None, gt=0.0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is larger than max_replicas")
        if not self.min_replicas <= (self.initial_replicas or self.min_replicas) <= self.max_replicas:
            raise ValueError("initial_replicas is not between min_replicas and max_replicas")
        return self


class RaySettings(SettingsModel):
    """``ray``: the cluster of Ray that replicas run on."""

    address: str | None = None
    """Address of a running Ray cluster (`auto`: this machine's); None: Ray is started on loopback, and ended
    with the command."""
    cpus_per_replica: float = Field(default=0.0, ge=0.0)
    """Cores that Ray reserves for a replica; 0: none, for a machine that runs nothing else."""
    gpus_per_replica: float = Field(default=0.0, ge=0.0)
    object_store: int = Field(default=200 * 10**6, ge=80 * 10**6)
    """Bytes of Ray's object store, if it is started here. Requests and answers don't go through it."""
    graceful_shutdown_s: float = Field(default=60.0, gt=0.0)
    """Time that a replica which is replaced has for its running requests."""


class Replicas(SettingsModel):
    """Equal replicas behind one address, on Ray Serve."""

    count: int | None = Field(default=None, ge=1, le=1024)
    autoscaling: Autoscaling | None = None
    router: RouterName = "cache-aware"
    """How a replica is chosen; `power-of-two` is Ray Serve's own."""
    num_ingress: int = Field(default=2, ge=1, le=64)
    """Processes that pass requests on to replicas. With one, nobody answers while it is replaced."""
    ray: RaySettings = RaySettings()

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.count is None) == (self.autoscaling is None):
            raise ValueError("give count or autoscaling")
        return self

    @property
    def at_most(self) -> int:
        """The largest number of replicas that may run."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.count or 1


class PrefillDecode(SettingsModel):
    """Engines that compute prompts, engines that answer, and pools between them, on this machine."""

    num_prefill: int = Field(default=1, ge=1, le=64)
    """Data-parallel ranks that compute prompts."""
    num_decode: int = Field(default=1, ge=1, le=64)
    """Data-parallel ranks that answer."""
    pools: tuple[PoolSettings, ...] = Field(min_length=1, max_length=64)
    """Where their KV meets. The ranks of both sides are dealt out to the pools in turn; a request stays
    within one pool."""
    decode_cache: bool = False
    """Whether the ranks that answer keep prefixes too."""
    log_dir: Path | None = None
    """Directory of the engines' logs, `prefill-0.log` and so on; None: a new one for temporary files."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if len(self.pools) > min(self.num_prefill, self.num_decode):
            raise ValueError("every pool needs a rank that computes prompts and one that answers")
        return self


class ClusterFile(SettingsModel):
    """One cluster: replicas, or prefill and decode."""

    settings: Settings
    """Settings of every engine; `host` and `port` of its server table are the cluster's."""
    replicas: Replicas | None = None
    prefill_decode: PrefillDecode | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.replicas is None) == (self.prefill_decode is None):
            raise ValueError("give replicas or prefill_decode")
        return self


def read_cluster_file(file: Path, environ: Mapping[str, str] | None = None) -> ClusterFile:
    """Return what the file says; variables of the environment beat its settings. Raises ConfigError.

    Relative paths are of the working directory, as in a server's own file.
    """
    content = read_yaml(file)
    tables = content.get("settings")
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: settings must hold what a server's own file would")
    try:
        settings = load_settings(tables=tables, environ=environ)
        return ClusterFile.model_validate({**content, "settings": settings})
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except ValidationError as error:
        entries = error.errors(include_url=False, include_context=False)
        lines = (f"{'.'.join(str(part) for part in entry['loc'])}: {entry['msg']}" for entry in entries)
        raise ConfigError(f"{file}: " + "; ".join(line.removeprefix(": ") for line in lines)) from error
