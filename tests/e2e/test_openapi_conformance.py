"""What the server answers is what its OpenAPI document says: statuses, types, shapes of errors."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.conftest import Served
from tests.generated_requests import document_of, send_generated

NUM_EXAMPLES = {GenerationMode.POSITIVE: 2, GenerationMode.NEGATIVE: 1}
"""Of each operation; `test_fuzz.py` sends more, to a real engine."""
MANY_EXAMPLES = 6
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]


def test_the_document_is_valid_and_every_path_parameter_is_defined(shared_server: Served) -> None:
    api = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")
    api.validate()
    document: dict[str, Any] = api.raw_schema
    for path, methods in document["paths"].items():
        named = {part[1:-1] for part in path.replace("timed{", "/{").split("/") if part.startswith("{")}
        for operation in methods.values():
            defined = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert defined == named, path
            assert len(operation["responses"]) > 10


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.slow)]
)
def test_answers_are_as_the_document_says(shared_server: Served, mode: GenerationMode) -> None:
    check_answers(shared_server, mode, NUM_EXAMPLES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_more_answers_are_as_the_document_says(shared_server: Served, mode: GenerationMode) -> None:
    check_answers(shared_server, mode, MANY_EXAMPLES)


def check_answers(server: Served, mode: GenerationMode, num_examples: int) -> None:
    def check(case: schemathesis.Case, response: Any) -> None:
        case.validate_response(response, checks=CHECKS)

    api = document_of(server.url)
    assert send_generated(api, mode, num_examples, check) > 60
