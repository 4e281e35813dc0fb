"""A server with two tenants, and a clock on what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, SchedulerSettings, Settings
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key
from tests.server.scripted_engine import ScriptedEngine

PROMPT = {"prompt": "ab", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class Rig:
    def __init__(self, engine: ScriptedEngine, tmp_path: Path, limits: str, **changes: object) -> None:
        path = tmp_path / "keys.toml"
        self.keys = {name: {"authorization": f"Bearer {add_key(path, name)}"} for name in ("ada", "bob")}
        path.write_text(path.read_text().replace('[tenants."ada"]\n', f'[tenants."ada"]\n{limits}\n'))
        scheduler = SchedulerSettings(max_waiting=int(str(changes.pop("max_waiting", 1024))))
        self.settings = Settings(
            engine=EngineSettings(model=ModelSettings(path=Path("scripted")), scheduler=scheduler),
            server=ServerSettings.model_validate({"api_keys_file": path, "admin_key": "root", **changes}),
        )
        self.app = create_app(engine, self.settings)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def ask(
        self, name: str, body: Mapping[str, object], path: str = "/v1/completions"
    ) -> httpx.Response:
        return await self.client.post(path, json=body, headers=self.keys[name])

    async def held(self) -> dict[str, int]:
        shown = await self.client.get("/admin/live/now", headers={"authorization": "Bearer root"})
        return {one["name"]: one["held"] for one in shown.json()["budgets"]}
