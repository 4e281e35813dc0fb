"""A fleet as `/health` of a proxy shows it, to whoever has the admin key."""

from __future__ import annotations

from typing import Any

from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.member import FleetMember, Outcome


def describe(fleet: Fleet) -> dict[str, Any]:
    """Return the standing, the load and the counters of each server."""
    return {
        "num_retries": sum(member.num_retries for member in fleet.members),
        "num_lost_retries": fleet.num_lost_retries,
        "servers": {member.url: member.health.standing.value for member in fleet.members},
        "loads": {
            member.url: {
                "requests": fleet.load(member).num_requests,
                "tokens_to_compute": fleet.load(member).num_tokens,
                "answers": fleet.load(member).num_running,
            }
            for member in fleet.members
        },
    }


def num_failures(member: FleetMember) -> int:
    """Return the tries at a server that ended with its failure, or found it busy."""
    kinds = (Outcome.UNSENT, Outcome.BUSY, Outcome.FAILED, Outcome.LATE, Outcome.LOST, Outcome.BROKEN)
    return sum(member.outcomes[kind] for kind in kinds)
