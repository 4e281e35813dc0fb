"""Every route of files and batches: with a meter, unread, at its largest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.door.rig import Rig
from tests.server.door.unread import check_given_back, check_meter, metered_routes, tenant_routes, walk_rig
from tests.server.scripted_engine import ScriptedEngine

from stemma_batch.registered import API

ROUTES, METERED = tenant_routes(API.routers), metered_routes(API.routers)
FREE = {
    ("DELETE", "/v1/files/{file_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
}
"""Routes that don't count as requests: an end, which gives back, and rows of one's own, bounded in number."""
ASKED: dict[str, Any] = {"prompt": "hello world " * 100}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ASKED}).encode()
BATCH = {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"}


def upload_of(num_lines: int) -> tuple[bytes, str]:
    """Return the body of an upload, and its type."""
    fields = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    fields += b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    content = fields + (LINE + b"\n") * num_lines + b"\r\n--cut--\r\n"
    return content, "multipart/form-data; boundary=cut"


async def kept(rig: Rig) -> httpx.Response:
    content, kind = upload_of(1)
    headers = rig.keys["ada"] | {"content-type": kind}
    return await rig.client.post("/v1/files", content=content, headers=headers)


def test_each_route_is_known_here() -> None:
    assert FREE | METERED == ROUTES
    assert set() == FREE & METERED
    assert {path for method, path in METERED if method == "POST"} == {"/v1/files", "/v1/batches"}


@pytest.mark.parametrize(("method", "path"), sorted(METERED))
async def test_each_route_has_a_meter(engine: ScriptedEngine, tmp_path: Path, method: str, path: str) -> None:
    await check_meter(engine, tmp_path, method, path, BATCH, batch_directory=tmp_path / "batches")


async def test_an_upload_holds_what_the_ledger_says(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(engine, tmp_path, "", batch_directory=tmp_path / "batches")
    await walk_rig(rig, monkeypatch, "/v1/files", *upload_of(3000))


async def test_a_batch_holds_what_the_ledger_says(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(engine, tmp_path, "", batch_directory=tmp_path / "batches")
    asked = BATCH | {"input_file_id": (await kept(rig)).json()["id"]}
    await walk_rig(rig, monkeypatch, "/v1/batches", json.dumps(asked).encode())


@pytest.mark.parametrize("path", sorted(path for method, path in ROUTES if method == "GET"))
async def test_what_is_read_is_given_back(engine: ScriptedEngine, tmp_path: Path, path: str) -> None:
    await check_given_back(engine, tmp_path, path, batch_directory=tmp_path / "batches")
