"""Request bodies of MindIE's own API and of Triton's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import MAX_INT32, Name, TokenId
from stemma.server.schemas.tgi import TGIParameters

PromptIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
"""As many as the context holds; the body's size bounds the list before that is looked at."""
RequestName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.:-]+$")]
MAX_TENSORS = 8


class InferParameters(TGIParameters):
    """``parameters`` of `/infer` and of Triton's endpoints: TGI's, and two more."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = TGIParameters.refused
    harmless: ClassVar[frozenset[str]] = TGIParameters.harmless | {"batch_size", "binary_data_output"}

    priority: Annotated[int, Field(ge=1, le=5)] = 5
    """Taken and without effect: waiting requests are ordered by the server."""
    timeout: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Seconds after which the request fails."""


class InferRequest(RequestModel):
    """Body of ``POST /infer`` and ``/infer_token``."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"parameters": InferParameters}

    inputs: str | None = None
    input_id: PromptIds | None = None
    stream: bool = False
    parameters: InferParameters = InferParameters()


class TritonTensor(RequestModel):
    """A prompt as token ids."""

    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MAX_INT32)]], Field(min_length=1, max_length=2)]
    datatype: Literal["UINT32", "INT32", "INT64", "UINT64"]
    data: PromptIds
    parameters: InferParameters | None = None


class TritonOutput(RequestModel):
    """An output that is asked for."""

    harmless: ClassVar[frozenset[str]] = frozenset({"parameters"})

    name: Name


class TritonInferRequest(RequestModel):
    """Body of ``POST /v2/models/MODEL/infer``."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"parameters": InferParameters}
    harmless: ClassVar[frozenset[str]] = frozenset({"binary_data_output"})

    id: RequestName | None = None
    inputs: Annotated[list[TritonTensor], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
    outputs: Annotated[list[TritonOutput], Field(max_length=MAX_TENSORS, fail_fast=True)] | None = None
    parameters: InferParameters = InferParameters()


class TritonGenerateRequest(RequestModel):
    """Body of ``POST /v2/models/MODEL/generate`` and ``generate_stream``."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"parameters": InferParameters}

    id: RequestName | None = None
    text_input: str
    parameters: InferParameters = InferParameters()


class TritonStopRequest(RequestModel):
    """Body of ``POST /v2/models/MODEL/stopInfer``."""

    id: RequestName


class TokenizerRequest(RequestModel):
    """Body of MindIE's ``POST /v1/tokenizer``."""

    inputs: str
    do_decode: bool = True
    """Return the tokens as text."""
