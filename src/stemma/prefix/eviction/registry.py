"""Eviction policies by name: what `--eviction` accepts. The lab has more (lab/policies/)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from stemma.errors import ConfigError
from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.eviction.retention import RetentionPolicy

_ALL: tuple[type[EvictionPolicy], ...] = (
    HazardPolicy,
    LRUPolicy,
    RetentionPolicy,
)
Policies: TypeAlias = Mapping[str, type[EvictionPolicy]]
POLICIES: Policies = MappingProxyType({policy.name: policy for policy in _ALL})
"""Every policy, by its name. A new policy is one file and one entry here."""


def make_policy(spec: str, policies: Policies = POLICIES) -> EvictionPolicy:
    """Build a policy from its name, which options may follow: ``hazard:max_ghosts=4096``.

    An option is a parameter of the policy's class, a whole number above 0. Raises ConfigError for an unknown
    name or option.
    """
    name, *texts = spec.split(":")
    policy = policies.get(name)
    if policy is None:
        more = "" if policies is not POLICIES else " (stemma replay --policy compares them with more)"
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(sorted(policies))}{more}")
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
