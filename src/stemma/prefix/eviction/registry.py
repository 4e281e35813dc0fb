"""Eviction policies by name: what `--eviction-policy` and `stemma replay --policy` accept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stemma.errors import ConfigError
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import EvictionPolicy

POLICIES: Mapping[str, type[EvictionPolicy]] = MappingProxyType(
    {policy.name: policy for policy in (LRUPolicy,)},
)
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
