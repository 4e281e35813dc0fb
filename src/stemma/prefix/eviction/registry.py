"""Eviction policies by name: what `--eviction-policy` and `stemma replay --policy` accept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stemma.errors import ConfigError
from stemma.prefix.eviction.arc import ARCPolicy
from stemma.prefix.eviction.fifo import FIFOPolicy
from stemma.prefix.eviction.gdsf import GDSFPolicy
from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.eviction.lfu import LFUPolicy
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.eviction.retention import RetentionPolicy
from stemma.prefix.eviction.s3fifo import S3FIFOPolicy
from stemma.prefix.eviction.sieve import SievePolicy

_ALL: tuple[type[EvictionPolicy], ...] = (
    ARCPolicy,
    FIFOPolicy,
    GDSFPolicy,
    HazardPolicy,
    LFUPolicy,
    LRUPolicy,
    RetentionPolicy,
    S3FIFOPolicy,
    SievePolicy,
)
POLICIES: Mapping[str, type[EvictionPolicy]] = MappingProxyType({policy.name: policy for policy in _ALL})
"""Every policy, by its name. A new policy is one file and one entry here."""


def policy_names() -> list[str]:
    """Return the known names, sorted."""
    return sorted(POLICIES)


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """Build a policy. Raises ConfigError for an unknown name or option."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(policy_names())}")
    try:
        return policy(**options)
    except TypeError as error:
        raise ConfigError(f"eviction policy {name!r}: {error}") from error
