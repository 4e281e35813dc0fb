"""Requests that schemathesis makes from the OpenAPI document, for every operation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

LEFT_OUT = ("/stopService", "/v1/engine-server/fault-handling-command", "/admin/live")
"""Operations that stop the server or the engine, and a stream without an end."""


def document_of(url: str) -> Any:
    """Return the document of a running server, without the paths of `LEFT_OUT`."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json").exclude(path=[*LEFT_OUT])


def send_generated(
    api: Any, mode: GenerationMode, num_examples: int, check: Callable[[schemathesis.Case, Any], None]
) -> int:
    """Send each operation bodies that fit the document, or that don't; return the number of operations.

    `check` gets each case and its answer. The requests are the same in every run.
    """
    num_operations = 0
    for result in api.get_all_operations():
        operation = result.ok()
        num_operations += 1

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def probe(case: schemathesis.Case) -> None:
            check(case, case.call(timeout=60))

        # Unsatisfiable: nothing to get wrong, neither body nor parameters.
        with suppress(Unsatisfiable), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probe()
    return num_operations
