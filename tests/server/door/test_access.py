"""Keys, and what keeps web pages out of a server without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import orjson
import pytest
from fastapi import FastAPI

from stemma.config.loading import load_settings
from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.errors import ConfigError
from stemma.server.app import create_app
from tests.server.scripted_engine import ScriptedEngine

MakeClient = Callable[..., httpx.AsyncClient]
PROMPT = {"prompt": "x"}


@pytest.fixture
def make(engine: ScriptedEngine) -> MakeClient:
    def make_client(
        peer: str = "127.0.0.1", base_url: str = "http://localhost:8000", **server: object
    ) -> httpx.AsyncClient:
        settings = Settings(
            engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
            server=ServerSettings.model_validate(server),
        )
        app: FastAPI = create_app(engine, settings)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=(peer, 5))
        return httpx.AsyncClient(transport=transport, base_url=base_url)

    return make_client


def bearer(key: str) -> httpx.Headers:
    return httpx.Headers([(b"authorization", b"Bearer " + key.encode())])


async def test_a_key_may_have_any_letters(make: MakeClient) -> None:
    client = make(api_key="schlüssel-鍵", base_url="http://anything")
    assert (await client.post("/v1/completions", json=PROMPT)).status_code == 401
    for wrong in ("schlussel-鍵", "", "\u00ff"):
        assert (await client.post("/v1/completions", json=PROMPT, headers=bearer(wrong))).status_code == 401
    assert (
        await client.post("/v1/completions", json=PROMPT, headers=bearer("schlüssel-鍵"))
    ).status_code == 200


def test_keys_that_would_open_the_server_are_refused(tmp_path: Path) -> None:
    for given in ({"api_key": ""}, {"admin_key": " x"}, {"api_key": "two\nlines"}):
        with pytest.raises(ConfigError) as caught:
            load_settings(flags={"model": "m", **given})
        assert "two" not in str(caught.value)
    with pytest.raises(ConfigError, match="give everybody access"):
        load_settings(flags={"model": "m"}, environ={"STEMMA_API_KEY": ""})


async def test_a_key_from_a_file(make: MakeClient, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    client = make(api_key_file=file)
    assert (await client.get("/v1/models", headers=bearer("s3cret"))).status_code == 200
    assert (await client.get("/v1/models")).status_code == 401
    file.write_text("\n")
    for given in (
        {"api_key_file": file},
        {"api_key_file": tmp_path / "none"},
        {"api_key": "x", "api_key_file": file},
    ):
        with pytest.raises(ConfigError):
            make(**given)


async def test_administration_has_its_own_key(make: MakeClient) -> None:
    client = make(api_key="user", admin_key="root", peer="10.0.0.9", base_url="http://stemma.example")
    for path in ("/admin/stats", "/admin/cache/tree", "/admin/cache/pins"):
        assert (await client.get(path, headers=bearer("user"))).status_code == 401
    assert (await client.get("/admin/stats", headers=bearer("root"))).status_code == 200
    assert (await client.get("/v1/models", headers=bearer("root"))).status_code == 401


async def test_without_an_admin_key_only_this_machine_administers(make: MakeClient) -> None:
    assert (await make().get("/admin/stats")).status_code == 200
    assert (await make(peer="::1").get("/admin/stats")).status_code == 200
    assert (await make(peer="10.0.0.9").get("/admin/stats")).status_code == 403
    assert (await make(base_url="http://evil.example").get("/admin/stats")).status_code == 403
    behind_proxy = {"x-forwarded-for": "10.0.0.9"}
    assert (await make().get("/admin/stats", headers=behind_proxy)).status_code == 403
    with_key = make(api_key="user")
    assert (await with_key.get("/admin/stats")).status_code == 401
    assert (await with_key.get("/admin/stats", headers=bearer("user"))).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/admin/cache/flush"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"origin": "http://[bad"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_pages_cannot_ask_a_local_server(
    make: MakeClient, path: str, headers: dict[str, str], status: int
) -> None:
    response = await make().post(path, json=PROMPT, headers=headers)
    assert response.status_code == status, response.text
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "[::1]:8000"},
        {"host": "LOCALHOST"},
        {"origin": "http://localhost:8000"},
        {"content-type": "application/json; charset=utf-8"},
    ],
)
async def test_local_programs_can(make: MakeClient, headers: dict[str, str]) -> None:
    response = await make().post("/v1/completions", json=PROMPT, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"origin": "http://localhost"}, 415), ({"sec-fetch-site": "cross-site"}, 415)],
)
async def test_a_body_of_no_declared_type_is_a_programs(
    make: MakeClient, headers: dict[str, str], status: int
) -> None:
    """tritonclient declares none; a page can't send one without telling that it is a page."""
    body = orjson.dumps(PROMPT)
    response = await make().post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text


async def test_allowed_origins(make: MakeClient) -> None:
    client = make(allowed_origins="http://ui.example, http://other.example", api_key="k")
    asked = {
        "origin": "http://ui.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = await client.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://ui.example"
    answer = await client.post(
        "/v1/completions", json=PROMPT, headers={**bearer("k"), "origin": "http://ui.example"}
    )
    assert answer.headers["access-control-allow-origin"] == "http://ui.example"
    keyless = make(allowed_origins=("http://ui.example",))
    headers = {"origin": "http://ui.example"}
    assert (await keyless.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200
    other = await client.options("/v1/completions", headers={**asked, "origin": "http://evil.example"})
    assert other.status_code == 400


async def test_imports_are_refused_unless_trusted(make: MakeClient) -> None:
    headers = {"content-type": "application/octet-stream"}
    refused = await make().post("/admin/cache/import", content=b"STEMMAKV", headers=headers)
    assert refused.status_code == 403
    assert "--trust-imports" in refused.text


async def test_imports_obey_the_body_limit(make: MakeClient) -> None:
    async def chunks():
        for _ in range(20):
            yield b"x" * 1000

    client = make(trust_imports=True, max_body_bytes=10_000)
    headers = {"content-type": "application/octet-stream"}
    assert (await client.post("/admin/cache/import", content=chunks(), headers=headers)).status_code == 413
