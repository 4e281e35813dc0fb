"""Whatever a client sends to MindIE's and Triton's endpoints: no 5xx, nothing left."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.hostile_bodies import BODIES, check_no_server_error

from stemma.model.text.tokenizer import Tokenizer

POSTS = (
    "/infer",
    "/infer_token",
    "/v2/models/scripted/infer",
    "/v2/models/scripted/generate",
    "/v2/models/scripted/generate_stream",
    "/v2/models/scripted/stopInfer",
    "/v1/tokenizer",
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), body=BODIES)
async def test_no_body_is_a_server_error(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    await check_no_server_error(tokenizer, path, body)
