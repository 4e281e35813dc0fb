"""Images in the lines of a batch, over a real engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.vision_checkpoints import make_vision_checkpoint, picture

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, Settings
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings
from stemma.native.library import load_kernels
from stemma.server.app import create_app

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")


@pytest.fixture(params=["qwen2.5-vl", "gemma3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> EngineSettings:
    checkpoint = make_vision_checkpoint(str(request.param), tmp_path / "tiny")
    return engine_settings(
        checkpoint, block_size=16, kv_cache_memory="4MB", num_threads=1, free_windows=False
    )


def asking(image: Image.Image, question: str) -> dict[str, Any]:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 5, "temperature": 0}


async def encoded(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith("stemma_images_encoded_total ")).split()[1])


async def test_lines_of_a_batch_may_have_images(settings: EngineSettings, tmp_path: Path) -> None:
    """Their answers are those of single requests, and an image is encoded once for all lines."""
    engine = AsyncEngine.from_settings(settings)
    server = ServerSettings(batch_directory=tmp_path / "batches", batch_seats=2)
    app = create_app(engine, Settings(engine=settings, server=server))
    bodies = [asking(picture(1), question) for question in ("What is this?", "Who was that?", "And why?")]
    lines: list[dict[str, Any]] = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(json.dumps(one | {"body": {"model": "tiny", **one["body"]}}) for one in lines)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http,
    ):
        single = [(await http.post("/v1/chat/completions", json=body)).json() for body in bodies]
        await engine.cache_control.flush()
        file = await http.post(
            "/v1/files", files={"file": ("in.jsonl", content.encode())}, data={"purpose": "batch"}
        )
        asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
        batch = (await http.post("/v1/batches", json=asked | {"completion_window": "24h"})).json()
        async with asyncio.timeout(20):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.02)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        assert (batch["status"], batch["error_file_id"]) == ("completed", None)
        found = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
        answers = [json.loads(one)["response"]["body"]["choices"][0]["message"] for one in found]
        assert answers == [one["choices"][0]["message"] for one in single]
        assert await encoded(http) == 1
    engine.close()
