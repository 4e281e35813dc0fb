"""Request body of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stemma.server.schemas.base import Kinds, RequestModel
from stemma.server.schemas.bounds import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    Name,
    PositiveCount,
    TemplateKwargs,
    ThinkingBudget,
    Tools,
)
from stemma.server.schemas.shared import ContinuedRequest, KeptRequest, SampledRequest

MAX_METADATA = 16
"""Entries of `metadata`, as OpenAI has it."""
MAX_METADATA_CHARS = 512

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_NAME_CHARS)], Annotated[str, Field(max_length=MAX_METADATA_CHARS)]
    ],
    Field(max_length=MAX_METADATA),
]
ITEMS = Kinds(
    "items",
    spoken=frozenset(
        {
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "local_shell_call",
            "local_shell_call_output",
            "shell_call",
            "shell_call_output",
            "apply_patch_call",
            "apply_patch_call_output",
            "agent_message",
            "additional_tools",
        }
    ),
    skipped=frozenset(
        {
            "web_search_call",
            "file_search_call",
            "code_interpreter_call",
            "computer_call",
            "computer_call_output",
            "image_generation_call",
            "mcp_list_tools",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "tool_search_call",
            "tool_search_output",
            "compaction",
            "compaction_trigger",
            "context_compaction",
            "ghost_snapshot",
            "configuration_update",
            "program",
            "program_output",
        }
    ),
    refused=frozenset({"item_reference"}),
    default="message",
    others="skipped",
)
"""Items of a conversation. Skipped are those that tell of what OpenAI's own servers did."""
TOOLS = Kinds(
    "tools",
    spoken=frozenset({"function", "custom", "namespace", "local_shell", "shell", "apply_patch"}),
    skipped=frozenset(
        {
            "web_search",
            "web_search_preview",
            "file_search",
            "code_interpreter",
            "computer",
            "computer_use",
            "computer_use_preview",
            "image_generation",
            "mcp",
            "tool_search",
            "programmatic_tool_calling",
        }
    ),
    others="skipped",
)
"""Tools. Skipped are those that OpenAI's servers run."""
Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class TextOptions(RequestModel):
    """The form of the answer's text."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: dict[str, Any] | None = None
    """``{"type": "text" | "json_object"}`` or a JSON schema: type, name, schema, strict."""


class ReasoningOptions(RequestModel):
    """How much the model thinks before it answers."""

    harmless: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Name | None = None
    """``none`` turns thinking off; other words go to a chat template that knows them, or become a budget."""
    max_tokens: ThinkingBudget | None = None
    """Tokens of thinking behind which its end is forced. OpenRouter's."""


class ConversationName(RequestModel):
    """A conversation named by an object."""

    id: Name


class ConversationRequest(RequestModel):
    """Body of ``POST /v1/conversations`` and of its updates."""

    kinds: ClassVar[Mapping[str, Kinds]] = {"items": ITEMS}

    items: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    metadata: Metadata | None = None


class ConversationItems(RequestModel):
    """Body of ``POST /v1/conversations/{id}/items``."""

    kinds: ClassVar[Mapping[str, Kinds]] = {"items": ITEMS}

    items: Items


class ResponsesRequest(SampledRequest, KeptRequest, ContinuedRequest):
    """Body of ``POST /v1/responses``."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"text": TextOptions, "reasoning": ReasoningOptions}
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        # vLLM's
        "ec_transfer_params": (),
        "enable_response_messages": (False,),
        "include_reasoning": (True,),
        "kv_transfer_params": (),
        "media_io_kwargs": (),
        "mm_payload": (),
        "mm_processor_kwargs": (),
        "previous_input_messages": (),
        "return_mm_kwargs": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
    kinds: ClassVar[Mapping[str, Kinds]] = {
        "input": ITEMS,
        "input.tools": TOOLS,
        "tools": TOOLS,
        "tools.tools": TOOLS,
    }
    hints: ClassVar[frozenset[str]] = frozenset({"context_management", "max_tool_calls"})
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "image",
            "request_id",
            "safety_identifier",
            "service_tier",
            "stream_options",
        }
    )

    input: str | Items
    model: Name | None = None
    instructions: str | None = None
    """System message of this turn; those of earlier turns don't count."""
    previous_response_id: Name | None = None
    """Go on from this stored response."""
    conversation: Name | ConversationName | None = None
    """Go on from this conversation, and add this turn to it."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` permits what this server never does: to drop the middle of an input that is too long."""
    store: bool | None = None
    """Keep the response and its conversation for later turns; default: yes."""
    stream: bool | None = None
    max_output_tokens: PositiveCount | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Name], Field(max_length=64)] | None = None
    metadata: Metadata | None = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    session_id: Name | None = None
    # Beyond OpenAI: names as in the chat API.
    structured_outputs: dict[str, Any] | None = None
    """Checked as the chat API's."""
    chat_template_kwargs: TemplateKwargs | None = None


class InputTokensRequest(ResponsesRequest):
    """Body of ``POST /v1/responses/input_tokens``: what makes the prompt; all else has no effect."""
