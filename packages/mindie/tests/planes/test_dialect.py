"""What the core's planes do otherwise for MindIE's clients."""

from __future__ import annotations

import httpx
import orjson
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.server_settings import RequestSettings
from stemma.config.settings import Settings
from stemma.server.app import create_app


async def test_tgis_events_have_lists_of_ids(engine: ScriptedEngine, settings: Settings) -> None:
    mindie = settings.model_copy(update={"requests": RequestSettings(dialect="mindie")})
    transport = httpx.ASGITransport(app=create_app(engine, mindie))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(
            "/generate_stream", json={"inputs": "ab", "parameters": {"details": True}}
        )

    events = [orjson.loads(line[6:]) for line in response.text.split("\n\n") if line]
    reply = engine.reply_ids(engine.requests[0], 0)
    assert [item["token"]["id"] for item in events] == [[each] for each in reply]
    assert events[0]["token"]["special"] is None
    assert events[-1]["details"]["prompt_tokens"] == 2
