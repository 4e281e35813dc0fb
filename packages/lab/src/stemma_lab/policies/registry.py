"""Names that `stemma replay --policy` accepts: the server's policies, and those of the lab."""

from __future__ import annotations

from types import MappingProxyType

from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.eviction.registry import POLICIES, Policies, make_policy
from stemma_lab.policies.arc import ARCPolicy
from stemma_lab.policies.fifo import FIFOPolicy
from stemma_lab.policies.from_file import names_file, policy_from
from stemma_lab.policies.gdsf import GDSFPolicy
from stemma_lab.policies.lfu import LFUPolicy
from stemma_lab.policies.s3fifo import S3FIFOPolicy
from stemma_lab.policies.sieve import SievePolicy

_OWN: tuple[type[EvictionPolicy], ...] = (
    ARCPolicy,
    FIFOPolicy,
    GDSFPolicy,
    LFUPolicy,
    S3FIFOPolicy,
    SievePolicy,
)
LAB_POLICIES: Policies = MappingProxyType({**POLICIES, **{policy.name: policy for policy in _OWN}})
"""By name. A policy to be compared is one file here and one entry."""


def make_lab_policy(spec: str) -> EvictionPolicy:
    """Build a policy of the server or the lab (see `make_policy`), or of a file: ``FILE.py:CLASS``.

    Raises ConfigError.
    """
    if names_file(spec):
        return policy_from(spec)
    return make_policy(spec, LAB_POLICIES)
