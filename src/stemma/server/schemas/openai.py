"""Request bodies of OpenAI's API, with the extra fields that vLLM, MindIE and SGLang take."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from stemma.server.schemas.base import RequestModel


class StreamOptions(RequestModel):
    """How to stream."""

    include_usage: bool = False
    """Send usage in a last chunk of its own."""


class ResponseFormat(RequestModel):
    """Only free text is supported."""

    type: str


class OpenAIRequest(RequestModel):
    """Fields that chat and plain completions share. None: the checkpoint's default, then OpenAI's."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Beyond OpenAI: names as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    """Whether BOS and the like are added; default: yes for plain text, no for chat."""
    cache_salt: str | None = None
    """Prompts with different salts never share cached blocks."""
    priority: int | None = Field(default=None, ge=0, le=100)
    """Retention hint for the blocks that this request leaves behind."""
    cache_ttl_s: float | None = Field(default=None, gt=0)
    """Retention hint: seconds of disuse after which those blocks go first."""
    use_beam_search: bool = False
    """Search for the `n` likeliest answers; fields that shape sampling are ignored."""
    length_penalty: float = 1.0
    """Of the beam search; above 0 favours long answers."""
    response_format: ResponseFormat | None = None


class CompletionRequest(OpenAIRequest):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """Text, texts, token ids, or lists of token ids; checked item by item in `prompts.py`."""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    """Generate so many and return the `n` with the highest mean log-probability; or the beam width."""
    suffix: str | None = None


class Message(RequestModel):
    """One turn of a conversation. Fields that only the template knows are passed on to it."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(OpenAIRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
