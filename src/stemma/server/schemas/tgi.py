"""Request bodies of ``/generate``: TGI's shape and vLLM's, with MindIE's rules and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import (
    MAX_TEMPERATURE,
    Choices,
    Name,
    Parts,
    Penalty,
    PositiveCount,
    PositiveShare,
    RepetitionPenalty,
    Stops,
    TopK,
    UnsignedSeed,
)
from stemma.server.schemas.shared import SearchedRequest, StructuredOutputs


class TGIParameters(RequestModel):
    """``parameters`` of TGI's shape."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stop_sequences": ([],),
        "top_n_tokens": (0,),
        "n": (1,),
        "use_beam_search": (False,),
        "bad_words": ([],),
        "logit_bias": ({},),
        "response_format": (),
    }
    harmless: ClassVar[frozenset[str]] = frozenset({"return_prompt_tokens"})

    stop: Stops | None = None
    temperature: Annotated[float, Field(gt=0.0, le=MAX_TEMPERATURE)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    typical_p: PositiveShare | None = None
    do_sample: bool | None = None
    """None: sample exactly if a sampling field is given."""
    seed: UnsignedSeed | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    watermark: bool = False
    adapter_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./-]{1,256}$")] | None = None
    max_new_tokens: PositiveCount = 20
    best_of: Choices | None = None
    """Number of answers generated; returned is the one with the highest mean log-probability."""
    grammar: dict[str, Any] | None = None
    """The form that the answer must have: ``{"type": "json", "value": schema}`` or ``"regex"``."""
    details: bool = False
    decoder_input_details: bool = False
    return_full_text: bool = False
    truncate: PositiveCount | None = None
    """Number of the last prompt tokens that are kept."""


class TGIRequest(RequestModel):
    """Body of ``POST /generate``, ``/generate_stream`` and ``/``; only the last reads `stream`."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"parameters": TGIParameters}

    inputs: str | Parts
    parameters: TGIParameters = TGIParameters()
    stream: bool = False
    model: Name | None = None


class VLLMGenerateRequest(SearchedRequest):
    """Body of ``POST /generate`` in vLLM's shape."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logprobs": (),
        "prompt_logprobs": (),
        "prompt_logprob_token_ids": ([],),
        "logprob_token_ids": ([],),
        "guided_decoding": (),
        "spaces_between_special_tokens": (True,),
        "detokenize": (True,),
        "logits_processors": ([],),
        "early_stopping": (False,),
        "repetition_detection": (),
        "thinking_token_budget": (),
        "skip_reading_prefix_cache": (False,),
        "extra_args": ({},),
        "watermarking": (False,),
    }
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"structured_outputs": StructuredOutputs}

    prompt: str
    stream: bool = False
    model: Name | None = None
    max_tokens: PositiveCount | None = None
    n: Choices = 1
