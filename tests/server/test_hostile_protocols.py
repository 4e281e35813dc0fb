"""Whatever a client sends to TGI's and the tokenizer's endpoints: no 5xx, nothing left."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemma.model.text.tokenizer import Tokenizer
from tests.server.hostile_bodies import BODIES, check_no_server_error

POSTS = (
    "/tokenize",
    "/detokenize",
    "/generate",
    "/generate_stream",
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), body=BODIES)
async def test_no_body_is_a_server_error(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    await check_no_server_error(tokenizer, path, body)
