"""A server that signs, in this process, and another process that verifies."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from fastapi.testclient import TestClient

from stemma.config.loading import load_settings
from stemma.engine.async_engine import AsyncEngine
from stemma.server.app import create_app
from stemma_receipts.checking import check_files
from stemma_receipts.envelope import signed
from stemma_receipts.keys import key_id, make_key, read_private_key
from stemma_receipts.statement import Opening

Receipt = dict[str, Any]


@dataclass(frozen=True)
class SigningServer:
    """A running server with receipts."""

    client: TestClient
    model: Path
    key: Path

    def post(self, path: str, **body: Any) -> Any:
        """Ask for an answer with a receipt."""
        response = self.client.post(path, json={"stemma": {"receipt": True}, **body})
        assert response.status_code == 200, response.text
        return response

    def complete(self, prompt: Any, **body: Any) -> Receipt:
        """Return the receipt of a completion."""
        answer = self.post("/v1/completions", prompt=prompt, **{"max_tokens": 12, **body}).json()
        [receipt] = answer["usage"]["stemma"]["receipts"]
        return receipt

    def public(self) -> Path:
        """Return the file of the public key."""
        return self.key.with_name(f"{self.key.name}.pub")


@contextmanager
def signing(model: Path, folder: Path, **flags: Any) -> Iterator[SigningServer]:
    """Yield a server that signs."""
    key = folder / "key.pem"
    if not key.exists():
        make_key(key)
    given = {"model": model, "kv_cache_memory": "4MB", "block_size": 16, "num_threads": 1, "receipts": key}
    settings = load_settings(flags=given | {"load_when": "always"} | flags)
    engine = AsyncEngine.from_settings(settings.engine)
    try:
        with TestClient(create_app(engine, settings), base_url="http://localhost") as client:
            yield SigningServer(client, model, key)
    finally:
        engine.close()


def verified(server: SigningServer, receipts: list[Receipt], folder: Path, *more: object) -> list[str]:
    """Return what another process says of receipts, a line each: outcome, and why."""
    path, found = folder / "receipts.jsonl", folder / "found.json"
    path.write_text("".join(json.dumps(one) + "\n" for one in receipts))
    command = [sys.executable, "-m", "stemma", "verify", path, "--model", server.model]
    command += ["--key", server.public(), "--num-threads", 1, "--json", found, *more]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1, 3), done.stderr
    return [f"{one['outcome']} {one['why']}".strip() for one in json.loads(found.read_text())]


def verified_here(server: SigningServer, receipts: list[Receipt], folder: Path, **more: Any) -> list[str]:
    """Do the same in this process."""
    path = folder / "here.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in receipts))
    given: dict[str, Any] = {"adapters": {}, "images": [], "num_threads": 1, "kv_cache_memory": "8MB"} | more
    found = check_files(path, server.public(), server.model, share=1.0, chance=random.Random(0), **given)
    return [f"{one.outcome} {one.why}".strip() for one in found]


def statement_of(receipt: Receipt) -> dict[str, Any]:
    """Return what a receipt says."""
    return orjson.loads(base64.b64decode(receipt["envelope"]["payload"]))


def lied(server: SigningServer, receipt: Receipt, change: Callable[[dict[str, Any]], object]) -> Receipt:
    """Return a receipt with a change that a lying server signed, with hashes that fit it."""
    statement = statement_of(receipt)
    predicate = statement["predicate"]
    change(predicate)
    predicate["commitments"] = Opening.read(predicate["opening"]).commitments()
    key = read_private_key(server.key)
    return {"envelope": signed(orjson.dumps(statement), key, key_id(key.public_key()))}
