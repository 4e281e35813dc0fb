"""Request bodies of ``/generate``: TGI's shape and vLLM's, with MindIE's rules and limits."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from stemma.server.schemas.base import RequestModel

MAX_SEED = 2**63 - 1
MAX_STOPS = 1024
MAX_STOP_CHARS = 32768

StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class TGIParameters(RequestModel):
    """``parameters`` of TGI's shape."""

    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(default=None, gt=0)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, lt=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    do_sample: bool | None = None
    """None: sample exactly if a sampling field is given."""
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    repetition_penalty: float | None = Field(default=None, gt=0)
    frequency_penalty: float | None = None
    watermark: bool = False
    adapter_id: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_./-]{1,256}$")
    max_new_tokens: int = Field(default=20, gt=0, le=2**31 - 1)
    details: bool = False
    decoder_input_details: bool = False
    return_full_text: bool = False
    truncate: int | None = Field(default=None, gt=0)
    """Keep only the last so many prompt tokens."""


class TGIRequest(RequestModel):
    """Body of ``POST /generate``, ``/generate_stream`` and ``/``; only the last reads `stream`."""

    inputs: str | list[dict[str, Any]]
    parameters: TGIParameters = TGIParameters()
    stream: bool = False


class VLLMGenerateRequest(RequestModel):
    """Body of ``POST /generate`` in vLLM's shape."""

    prompt: str
    stream: bool = False
    model: str | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
