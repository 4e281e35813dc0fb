"""The few types of vLLM that our side reads; the real ones are in `test_real_server.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stemma.prefix.keys import KeySpace
from stemma.types import BlockKey, Tier
from stemma_connect.vllm.lookup import Lookup
from stemma_connect.vllm.scheduler import VllmRequest

BLOCK_SIZE = 4
SPACE = KeySpace("weights", "vllm 0:layout", BLOCK_SIZE)


@dataclass
class Request(VllmRequest):
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = -1
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.all_token_ids)


class FakeLookup(Lookup):
    """Has the keys that it is given."""

    def __init__(self) -> None:
        self.held: dict[BlockKey, Tier] = {}
        self.is_probing = False
        self.asked: list[tuple[str, BlockKey, list[BlockKey]]] = []

    def find(self, request_id: str, parent: BlockKey, keys: Sequence[BlockKey]) -> tuple[Tier, ...] | None:
        self.asked.append((request_id, parent, list(keys)))
        if self.is_probing:
            return None
        found = []
        for key in keys:
            if key not in self.held:
                break
            found.append(self.held[key])
        return tuple(found)

    def clear(self) -> bool:
        self.held.clear()
        return True
