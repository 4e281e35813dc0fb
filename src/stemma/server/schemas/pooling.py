"""Request bodies of embeddings (OpenAI's and vLLM's), of reranking (Jina's and vLLM's) and of scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import MAX_PROMPTS, Count, Name, PositiveCount
from stemma.server.schemas.openai import Prompt
from stemma.server.schemas.shared import KeptRequest

_HARMLESS = frozenset({"user", "request_id"})
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "mm_processor_kwargs": (),
    "use_activation": (True,),
    "softmax": (True,),
    "activation": (True,),
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
}


class EmbeddingRequest(KeptRequest):
    """Body of ``POST /v1/embeddings``."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": (),
    }
    harmless: ClassVar[frozenset[str]] = _HARMLESS

    model: Name | None = None
    """None: the one that is served."""
    input: Prompt
    """Text, texts, token ids, or lists of token ids; checked item by item in `prompts.py`."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the bytes of float32, little-endian; None: numbers."""
    dimensions: PositiveCount | None = None
    """Numbers of an embedding, where the model was trained to have them cut."""
    prompt_name: Name | None = None
    """The words that the checkpoint puts before a text, by name; None: its default. Token ids get none."""
    normalize: bool | None = None
    """Whether embeddings have length 1; None: as the checkpoint says."""
    add_special_tokens: bool = True
    """Whether the tokenizer's special tokens are put around texts."""
    truncate_prompt_tokens: PositiveCount | Literal[-1] | None = None
    """Number of a prompt's tokens that are kept; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """Where `truncate_prompt_tokens` cuts; None: on the left, so that the last tokens stay."""


class Document(RequestModel):
    """A document as an object."""

    text: str


class RerankRequest(KeptRequest):
    """Body of ``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED
    harmless: ClassVar[frozenset[str]] = _HARMLESS

    model: Name | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: Count | None = None
    """Number of results, the best ones; None and 0: all."""
    return_documents: bool | None = None
    """Whether results have the document's text; None: yes."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """The task, in words for the model; None: what it was trained with."""


Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class ScoreRequest(KeptRequest):
    """Body of ``POST /score`` and ``/v1/score``."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED
    harmless: ClassVar[frozenset[str]] = _HARMLESS

    model: Name | None = None
    text_1: Texts
    """A query, or as many as `text_2` has."""
    text_2: Texts
    """Documents."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """The task, in words for the model; None: what it was trained with."""
