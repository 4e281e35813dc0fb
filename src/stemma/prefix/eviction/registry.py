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


def make_policy(spec: str) -> EvictionPolicy:
    """Build a policy from its name, which options may follow: ``hazard:max_ghosts=4096``.

    An option is a parameter of the policy's class, a whole number above 0. Raises ConfigError for an unknown
    name or option.
    """
    name, *texts = spec.split(":")
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(policy_names())}")
    try:
        options: dict[str, Any] = dict(map(_option, texts))
        return policy(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"eviction policy {spec!r}: {error}") from error


def _option(text: str) -> tuple[str, int]:
    """Return name and value of ``name=value``; raise ValueError if it is no such thing."""
    name, _, value = text.partition("=")
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ValueError(f"write NAME=NUMBER with a whole number above 0 for {text!r}")
    return name, int(value)
