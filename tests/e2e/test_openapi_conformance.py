"""What the server answers is what its OpenAPI document says: statuses, types, shapes of errors."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.conftest import Served

NUM_EXAMPLES = 3
"""Of each operation and mode; `test_fuzz.py` sends more, to a real engine."""
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
ENDLESS = ["/admin/live"]
STOPS = ["/stopService", "/v1/engine-server/fault-handling-command"]


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


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_are_as_the_document_says(shared_server: Served, mode: GenerationMode) -> None:
    api = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json").exclude(path=[*ENDLESS, *STOPS])
    num_operations = 0
    for result in api.get_all_operations():
        operation = result.ok()
        num_operations += 1

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def probe(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            case.validate_response(response, checks=CHECKS)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(Unsatisfiable):  # no body that doesn't fit
                probe()
    assert num_operations > 60
