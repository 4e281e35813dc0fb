"""Messages from the scheduler's side of the connector to the worker's side, one with each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stemma.memory.tiers.device_block import DeviceBlock
from stemma.types import BlockKey


@dataclass(frozen=True, slots=True)
class LoadWork:
    """Blocks to load for one request before it is scheduled."""

    request_id: str
    keys: Sequence[BlockKey]
    block_ids: Sequence[int]
    """vLLM's blocks, one per key."""


@dataclass(slots=True)
class StepWork:
    """All work of one step. Pickled from process to process."""

    loads: list[LoadWork] = field(default_factory=list)
    saves: list[DeviceBlock] = field(default_factory=list)
    """Blocks that are full once the step has run."""
    hits: list[DeviceBlock] = field(default_factory=list)
    """Blocks of vLLM's own prefix cache that a request started with."""
    handed_over: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until their last saves are done."""
    settled: list[str] = field(default_factory=list)
    """Requests that need no lookup any more."""
    num_tokens: int = 0
    """Tokens that the step computes."""
    num_prompt_tokens: int = 0
    """Tokens among these that belong to prompts."""
