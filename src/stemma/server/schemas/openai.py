"""Request bodies of OpenAI's API, with the extra fields that vLLM, MindIE and SGLang take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from stemma.server.schemas.base import Kinds, RequestModel
from stemma.server.schemas.bounds import (
    MAX_KEPT,
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TEMPLATE_CHARS,
    Choices,
    Count,
    Name,
    NumLogprobs,
    Parts,
    PositiveCount,
    Priority,
    Role,
    TemplateKwargs,
    ThinkingBudget,
    Tools,
    Ttl,
)
from stemma.server.schemas.functions import tool_message, tool_request
from stemma.server.schemas.shared import ContinuedRequest, KeptRequest, SearchedRequest, StructuredOutputs

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # vLLM's, old names included
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "early_stopping": (False,),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang's
    "lora_path": (),
}


class StreamOptions(RequestModel):
    """How to stream."""

    include_usage: bool = False
    """Send usage in a last chunk of its own."""

    continuous_usage_stats: bool = False
    """With `include_usage`: the counts so far in each chunk, as vLLM has it."""

    harmless: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class JsonSchema(RequestModel):
    """``json_schema`` of a response format."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(RequestModel):
    """The form that the answer must have."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"json_schema": JsonSchema}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class KeptTokens(RequestModel):
    """A retention hint of a prompt's leading tokens."""

    num_tokens: PositiveCount
    """Leading tokens, as far as no entry before this one covers them."""
    priority: Priority | None = None
    cache_ttl_s: Ttl | None = None


class OpenAIRequest(SearchedRequest, KeptRequest):
    """Fields that chat and plain completions share. None: the checkpoint's default, then OpenAI's."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {
        "stream_options": StreamOptions,
        "response_format": ResponseFormat,
        "structured_outputs": StructuredOutputs,
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "request_id",
            "stream_interval",
        }
    )

    model: Name | None = None
    """None: the one that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    """What the client calls its conversation: recorded traces tell sessions apart by its hash."""
    session_id: Name | None = None
    """The same, in vLLM's words."""
    # Beyond OpenAI: names as in vLLM.
    add_special_tokens: bool | None = None
    """Whether BOS and the like are added; default: yes for plain text, no for chat."""
    truncation_side: Literal["left", "right"] | None = None
    """Where `truncate_prompt_tokens` cuts; None: on the left, so that the last tokens stay."""
    prompt_logprobs: NumLogprobs | None = None
    """Report how likely each token of the prompt was, and this number of the likeliest in its place."""
    return_progress: bool | None = None
    """In a stream, as llama.cpp has it: how far the prompt has come, each second until the answer begins."""
    return_token_ids: bool | None = None
    """Report the ids of prompt and answers beside their text."""
    cache_retention: Annotated[list[KeptTokens], Field(fail_fast=True, max_length=MAX_KEPT)] | None = None
    """Retention hints of leading tokens, ascending; `priority` and `cache_ttl_s` are those of the rest."""
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None
    """SGLang's name for a JSON schema as text."""
    regex: str | None = None
    ebnf: str | None = None


Prompt = Annotated[
    str | list[Any],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
            ]
        }
    ),
]


class CompletionRequest(OpenAIRequest):
    """Body of ``POST /v1/completions``."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSUPPORTED,
        "suffix": ("",),
        "thinking_token_budget": (),
    }

    prompt: Prompt
    """Text, texts, token ids, or lists of token ids; checked item by item in `prompts.py`."""
    logprobs: NumLogprobs | None = None
    echo: bool = False


class Message(RequestModel):
    """One turn of a conversation. Fields that only the template knows are passed on to it."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _in_new_words(cls, given: Any) -> Any:
        return tool_message(given) if isinstance(given, dict) else given

    role: Role
    content: str | Parts | None = None
    refusal: str | None = None
    """The words that the assistant said instead of `content`."""
    tool_calls: Tools | None = None


class ThinkingWish(RequestModel):
    """``thinking`` of a chat, as Anthropic, DeepSeek and GLM have it."""

    harmless: ClassVar[frozenset[str]] = frozenset({"clear_thinking", "display"})

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: ThinkingBudget | None = None


class ReasoningWish(RequestModel):
    """``reasoning`` of a chat, as OpenRouter has it."""

    harmless: ClassVar[frozenset[str]] = frozenset({"summary"})

    effort: Name | None = None
    max_tokens: ThinkingBudget | None = None
    enabled: bool | None = None
    exclude: bool = False
    """Leave the reasoning out of the answer."""


class ThinkingRequest(RequestModel):
    """Whether a model thinks, and how long: the names that servers and vendors have for it."""

    enable_thinking: bool | None = None
    """For templates that know it, under whichever name."""
    thinking: bool | ThinkingWish | None = None
    reasoning: ReasoningWish | None = None
    reasoning_effort: Name | None = None
    """``none``: don't think. Other words go to a chat template that knows them, or become a budget."""
    thinking_token_budget: ThinkingBudget | None = None
    """Tokens of thinking behind which its end is forced, in vLLM's words."""
    max_reasoning_tokens: ThinkingBudget | None = None
    thinking_budget_tokens: ThinkingBudget | None = None
    """llama.cpp's."""
    reasoning_budget: ThinkingBudget | None = None
    """llama.cpp's other one."""
    thinking_budget: ThinkingBudget | None = None
    """Qwen's."""


PARTS = Kinds(
    "parts",
    spoken=frozenset({"text", "input_text", "output_text", "image_url", "refusal"}),
    skipped=frozenset({"thinking", "redacted_thinking", "reasoning"}),
    or_with="text",
)
"""Parts of a message."""
_TOOLS = Kinds(
    "tools",
    spoken=frozenset({"function"}),
    skipped=frozenset(
        {
            "web_search",
            "web_search_preview",
            "browser_search",
            "code_interpreter",
            "code_execution",
            "file_search",
            "retrieval",
            "image_generation",
            "mcp",
        }
    ),
    default="function",
)
"""Tools. Skipped are those that a vendor's servers run."""


def _plain_choice(choice: Any) -> Any:
    """Return ``{"type": "auto"}`` and the like as the word alone."""
    if isinstance(choice, dict) and choice.get("type") in ("none", "auto", "required", "any"):
        return "required" if choice["type"] == "any" else choice["type"]
    return choice


def _spoken_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return [tool for tool in tools or () if _TOOLS.speaks(tool)] or None


class ChatRequest(OpenAIRequest, ContinuedRequest, ThinkingRequest):
    """Body of ``POST /v1/chat/completions``."""

    kinds: ClassVar[Mapping[str, Kinds]] = {"tools": _TOOLS, "messages.content": PARTS}
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {
        **OpenAIRequest.nested,
        "thinking": ThinkingWish,
        "reasoning": ReasoningWish,
    }
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSUPPORTED,
        "moderation": (),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "documents": ([],),
        "echo": (False,),
        "mm_processor_kwargs": (),
        "media_io_kwargs": (),
        # TGI's
        "tool_prompt": (),
    }
    harmless: ClassVar[frozenset[str]] = OpenAIRequest.harmless | {"prediction"}
    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    @model_validator(mode="before")
    @classmethod
    def _in_new_words(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        reasoning = given.get("reasoning")
        hides = isinstance(reasoning, dict) and reasoning.get("exclude") is True
        return tool_request({**given, "include_reasoning": False} if hides else given)

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    functions: Tools | None = None
    """The older form of `tools`, answered in its own words."""
    function_call: Literal["none", "auto"] | dict[str, Any] | None = None
    """The older form of `tool_choice`."""
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[Tools | None, AfterValidator(_spoken_tools)] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | dict[str, Any] | None, BeforeValidator(_plain_choice)
    ] = None
    parallel_tool_calls: bool = True
    """Whether an answer may hold more than one call."""
    include_reasoning: bool = True
    """Whether the reasoning is part of the answer."""
    separate_reasoning: bool = True
    """Whether the reasoning is split from the content, where the model reasons."""
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    """Instead of the checkpoint's; only with `--trust-request-chat-template`."""
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
