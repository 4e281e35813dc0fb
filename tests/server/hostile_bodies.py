"""Bodies that clients should never send to TGI's, MindIE's, Triton's and the tokenizer's endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import create_app
from tests.server.scripted_engine import ScriptedEngine

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["ab", 1, [65, 66], [1, 2], "UINT32"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "shape", "data", "x"]), inner)
    ),
    max_leaves=6,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "max_new_tokens",
            "timeout",
            "priority",
            "temperature",
            "top_k",
            "seed",
            "details",
            "truncate",
            "stop",
        ]
    ),
    VALUES | st.integers(1, 30),
    max_size=4,
)
TENSORS = st.fixed_dictionaries(
    {
        "name": st.just("input0") | VALUES,
        "shape": st.just([1, 2]) | VALUES,
        "datatype": st.just("UINT32") | VALUES,
        "data": st.just([65, 66]) | VALUES,
    },
    optional={"parameters": PARAMETERS},
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.just("a") | VALUES,
        "inputs": st.just("ab") | st.lists(TENSORS, max_size=2) | VALUES,
        "input_id": VALUES,
        "text_input": st.just("ab") | VALUES,
        "prompt": VALUES,
        "tokens": VALUES,
        "messages": VALUES,
        "stream": st.booleans() | VALUES,
        "do_decode": VALUES,
        "parameters": PARAMETERS | VALUES,
        "outputs": VALUES,
    },
)


async def check_no_server_error(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    """Post a body: no 5xx, nothing left."""
    engine = ScriptedEngine(tokenizer)
    app = create_app(engine, Settings(engine=EngineSettings(model=ModelSettings(path=Path("scripted")))))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )

    assert response.status_code < 500, response.text
    assert engine.active == set()
    app.state.intake.close()
