"""Fields that request bodies of several APIs share. None: the checkpoint's default, then the API's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import (
    MAX_KEPT,
    MAX_STOPS,
    BadWords,
    Choices,
    Count,
    LengthPenalty,
    Name,
    Penalty,
    PositiveCount,
    PositiveShare,
    Priority,
    RepetitionPenalty,
    Salt,
    Seed,
    Share,
    Stops,
    Temperature,
    TokenBias,
    TokenIds,
    TopK,
    Ttl,
)


class PromptCacheOptions(RequestModel):
    """OpenAI's options of the prompt cache."""

    harmless: ClassVar[frozenset[str]] = frozenset({"mode"})

    ttl: Name | None = None
    """How long the prompt should stay at least: ``30m``, ``12h``, any number of s, m, h or d."""
    prewarm: bool = False
    """Compute the prompt and give no answer."""
    comparison_response_id: Name | None = None
    """Say what changed since this response. For `/v1/responses`."""


class KvHintAction(RequestModel):
    """What is asked of the cache."""

    action_id: Name
    action_type: Name
    action_version: Name
    payload: dict[str, Any]


class KvHints(RequestModel):
    """The envelope of an orchestrator's wishes, as vLLM, SGLang and Dynamo have it."""

    protocol_version: Literal["0.1"]
    message_id: Name
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_KEPT)]


class KeptRequest(RequestModel):
    """Rules for a request's blocks: which of them others may share, and how long they should stay."""

    kv_hints: KvHints | None = None
    """Wishes that are executed, each with a verdict in the answer's ``stemma.kv_hints``."""
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Name | None = None
    """OpenAI's older word for the ttl: ``in_memory`` or ``24h``."""

    cache_salt: Salt | None = None
    """Prompts with different salts never share cached blocks."""
    priority: Priority | None = None
    """Retention hint for the blocks that this request leaves behind."""
    cache_ttl_s: Ttl | None = None
    """Retention hint: seconds of disuse after which those blocks go first."""


class ContinuedRequest(RequestModel):
    """How a conversation's earlier answers become tokens again."""

    exact_history: bool | None = None
    """Answers that the conversation brings back get the ids that were generated, where the server remembers
    them. Default: yes, but not beside a `cache_salt`. Without effect if the server has it off."""


class SampledRequest(RequestModel):
    """How tokens are drawn, and when an answer ends. Names as in vLLM."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: PositiveShare | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: TokenBias | None = None
    """Token id -> what is added to its logit."""


class StructuredOutputs(RequestModel):
    """vLLM's ``structured_outputs``: exactly one of the fields."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"structural_tag": (), "whitespace_pattern": ()}
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"disable_fallback", "disable_any_whitespace", "disable_additional_properties"}
    )

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SearchedRequest(SampledRequest):
    """The same for APIs that also search, and choose the best of several answers."""

    min_tokens: Count = 0
    truncate_prompt_tokens: PositiveCount | None = None
    """Number of a prompt's tokens that are kept: the last ones, unless `truncation_side` says otherwise."""
    best_of: Choices | None = None
    """Number of answers generated: the `n` with the highest mean log-probability return; or beams."""
    use_beam_search: bool = False
    """Search for the `n` likeliest answers; fields that shape sampling are ignored."""
    length_penalty: LengthPenalty = 1.0
    """Exponent of lengths in the beam search; above 0 favours long answers."""
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    structured_outputs: StructuredOutputs | None = None
