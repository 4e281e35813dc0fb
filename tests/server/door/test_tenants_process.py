"""Tenants and the ledger of a server in a process of its own: SIGHUP, and what SIGKILL leaves."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from stemma.server.door.keyfile import add_key
from tests.server.scripted_process import scripted_server

BODY = {"model": "scripted", "prompt": "a b c", "max_tokens": 4}


@pytest.mark.slow
def test_a_hangup_reads_the_keys_again(tokenizer_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first = add_key(path, "ada")
    settings = {"server": {"api_keys_file": str(path)}}
    with scripted_server(tokenizer_path, 0.002, settings=settings) as (process, url):

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(f"{url}/v1/models", headers=headers).status_code

        assert status(first) == 200
        second = add_key(path, "bob")
        process.send_signal(signal.SIGHUP)
        while status(second) != 200:
            assert process.poll() is None
        path.write_text("no keys")
        process.send_signal(signal.SIGHUP)
        assert status(first) == 200


@pytest.mark.slow
def test_every_answer_seen_whole_is_in_the_ledger_of_a_killed_server(
    tokenizer_path: Path, tmp_path: Path
) -> None:
    """Clients ask, whole and streamed, until SIGKILL comes; nothing that they saw to the end is lost."""
    file = tmp_path / "usage.db"
    seen: list[str] = []
    lock = threading.Lock()
    with scripted_server(tokenizer_path, 0.002, settings={"server": {"ledger": str(file)}}) as (process, url):

        def ask(stream: bool) -> None:
            with httpx.Client() as client:
                while True:
                    try:
                        answer = client.post(f"{url}/v1/completions", json={**BODY, "stream": stream})
                    except httpx.HTTPError:
                        return
                    lines = [line for line in answer.text.splitlines() if line]
                    if stream and lines[-1:] != ["data: [DONE]"]:
                        return
                    whole = json.loads(lines[0].removeprefix("data: "))
                    with lock:
                        seen.append(whole["id"])
                        if len(seen) == 60:
                            process.kill()

        threads = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.connect() as connection:
        rows = connection.execute(sa.text("select request_id, outcome, output_tokens from usage")).all()
    engine.dispose()
    recorded = {str(request_id).removesuffix("-0") for request_id, _, _ in rows}
    assert len(seen) >= 60
    assert set(seen) <= recorded
    assert {(outcome, tokens) for _, outcome, tokens in rows} == {("ok", 4)}
