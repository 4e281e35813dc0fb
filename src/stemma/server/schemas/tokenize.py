"""Request bodies of the tokenizer's endpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import Messages, Name, TokenId


class TokenizeRequest(RequestModel):
    """Body of ``POST /tokenize``: vLLM's shape (`prompt` or `messages`) or TGI's (`inputs`)."""

    model: Name | None = None
    prompt: str | None = None
    inputs: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Body of vLLM's ``POST /detokenize``."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
