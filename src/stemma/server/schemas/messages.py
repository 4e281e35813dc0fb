"""Request bodies of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stemma.server.schemas.base import Kinds, RequestModel, undated
from stemma.server.schemas.bounds import (
    MAX_MESSAGES,
    MAX_STOPS,
    Count,
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

BLOCKS = Kinds(
    "blocks",
    spoken=frozenset(
        {
            "text",
            "image",
            "tool_use",
            "tool_result",
            "thinking",
            "document",
            "search_result",
            "tool_reference",
            "compaction",
        }
    ),
    skipped=frozenset(
        {
            "redacted_thinking",
            "server_tool_use",
            "web_search_tool_result",
            "web_fetch_tool_result",
            "code_execution_tool_result",
            "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result",
            "tool_search_tool_result",
            "advisor_tool_result",
            "mcp_tool_use",
            "mcp_tool_result",
            "mcp_tool_listing",
            "tool_addition",
            "tool_removal",
            "fallback",
        }
    ),
    refused=frozenset({"container_upload"}),
    or_with="text",
)
"""Content blocks. Skipped are those that tell of what Anthropic's own servers did."""
TOOLS = Kinds(
    "tools",
    spoken=frozenset({"custom", "bash", "text_editor", "memory"}),
    skipped=frozenset(
        {
            "web_search",
            "web_fetch",
            "code_execution",
            "tool_search_tool_bm25",
            "tool_search_tool_regex",
            "advisor",
            "mcp_toolset",
            "computer",
            "computer_toolset",
            "browser_toolset",
        }
    ),
    default="custom",
    others="skipped",
)
"""Tools. Skipped are those that Anthropic's servers run, and those that a model sees a screen for."""


class InputTurn(RequestModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Parts


class ThinkingParam(RequestModel):
    """Whether the model thinks before it answers."""

    harmless: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveCount | None = None
    """Tokens of thinking behind which its end is forced; `max_tokens` bounds thinking and answer together."""


class ToolChoice(RequestModel):
    """How tools are used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class CacheMark(RequestModel):
    """A mark: keep what the prompt holds up to here."""

    harmless: ClassVar[frozenset[str]] = frozenset({"scope"})

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class ClaudeTool(RequestModel):
    """A tool. One of the client's own has a name and a schema; the kinds of others are in `TOOLS`."""

    type: Name | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheMark | None = None

    @property
    def kind(self) -> str:
        """Its kind, without a date."""
        return undated(self.type or TOOLS.default)


class Diagnostics(RequestModel):
    """What is to be told of the cache."""

    previous_message_id: Name | None = None
    """Say what changed since this answer's request; None: nothing yet."""


class CountTokensRequest(RequestModel):
    """Body of ``POST /v1/messages/count_tokens``: what a prompt is made of."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {
        "thinking": ThinkingParam,
        "tool_choice": ToolChoice,
    }
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # vLLM's
        "ec_transfer_params": (),
        "kv_transfer_params": (),
        "mm_payload": (),
        "return_mm_kwargs": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
    kinds: ClassVar[Mapping[str, Kinds]] = {
        "tools": TOOLS,
        "system": BLOCKS,
        "messages.content": BLOCKS,
        "messages.content.content": BLOCKS,
    }
    hints: ClassVar[frozenset[str]] = frozenset(
        {"compaction", "container", "context_management", "fallbacks", "mcp_servers", "thread"}
    )
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "billing_policy",
            "fallback_credit_token",
            "inference_geo",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )

    messages: Annotated[list[InputTurn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: str | Parts | None = None
    tools: Annotated[list[ClaudeTool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingParam | None = None
    cache_control: CacheMark | None = None
    """A mark at the end of the prompt."""
    diagnostics: Diagnostics | None = None
    output_config: dict[str, Any] | None = None
    """``format``: a JSON schema that the answer follows; ``effort`` for templates that know it."""
    context_management: dict[str, Any] | None = None
    """Without effect but that the answer says so: the client's context is never edited here."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Beyond Anthropic, as in the chat API; `thinking` decides `enable_thinking`."""


class MessagesRequest(CountTokensRequest, KeptRequest, ContinuedRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: Count
    """0: the prompt is computed for later, and there is no answer."""
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
