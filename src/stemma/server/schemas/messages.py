"""Request bodies of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import (
    MAX_MESSAGES,
    MAX_STOPS,
    Name,
    Parts,
    PositiveCount,
    PositiveShare,
    Seed,
    Share,
    StopString,
    TemplateKwargs,
    TopK,
)
from stemma.server.schemas.shared import ContinuedRequest, KeptRequest


class Turn(RequestModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Parts


class Thinking(RequestModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveCount | None = None
    """Accepted without effect: `max_tokens` bounds thinking and answer together."""


class ToolChoice(RequestModel):
    """How tools are used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class CacheControl(RequestModel):
    """A mark: keep what the prompt holds up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class ClaudeTool(RequestModel):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class CountTokensRequest(RequestModel):
    """Body of ``POST /v1/messages/count_tokens``: what a prompt is made of."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"thinking": Thinking, "tool_choice": ToolChoice}
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "context_management": (),
        # vLLM's
        "ec_transfer_params": (),
        "kv_transfer_params": (),
        "mm_payload": (),
        "return_mm_kwargs": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "diagnostics",
            "inference_geo",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )

    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: str | Parts | None = None
    tools: Annotated[list[ClaudeTool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    """A mark at the end of the prompt."""
    output_config: dict[str, Any] | None = None
    """``format``: a JSON schema that the answer follows; ``effort`` for templates that know it."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Beyond Anthropic, as in the chat API; `thinking` decides `enable_thinking`."""


class MessagesRequest(CountTokensRequest, KeptRequest, ContinuedRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: PositiveCount
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool = False
    temperature: Share | None = None
    top_p: PositiveShare | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    """Ignored."""
    # Beyond Anthropic: names as in the chat API.
    seed: Seed | None = None
    ignore_eos: bool = False
