"""The page on compatibility names every field that the schemas know."""

from __future__ import annotations

import pytest
from tests.server.documented import check_fields

from stemma.server.schemas.base import RequestModel
from stemma_mindie.planes.schemas import (
    InferParameters,
    InferRequest,
    TokenizerRequest,
    TritonGenerateRequest,
    TritonInferRequest,
    TritonTensor,
)

SHAPES = (InferRequest, InferParameters, TritonInferRequest, TritonTensor, TritonGenerateRequest)


@pytest.mark.parametrize(
    ("title", "models"),
    [
        ("Fields of TGI's, MindIE's and Triton's shapes", SHAPES),
        ("Fields of the tokenizer's endpoints", (TokenizerRequest,)),
    ],
)
def test_every_field_is_in_its_table(title: str, models: tuple[type[RequestModel], ...]) -> None:
    check_fields(title, models)
