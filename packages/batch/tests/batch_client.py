"""Batches as a client sends them and waits for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI
from openai.types import Batch

CHAT = "/v1/chat/completions"
SHARED = "You answer questions about trees. " * 8


def line(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": text}]
    body = {"model": "scripted", "messages": messages, "max_tokens": 4, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def sent(client: OpenAI, lines: list[Any]) -> str:
    content = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("in.jsonl", content.encode()), purpose="batch").id


def begun(client: OpenAI, lines: list[Any], endpoint: Any = CHAT, window: Any = "24h") -> Batch:
    return client.batches.create(
        input_file_id=sent(client, lines), endpoint=endpoint, completion_window=window, metadata={"a": "b"}
    )


def waited(client: OpenAI, batch: Batch, until: Callable[[Batch], bool] | None = None) -> Batch:
    ended = until or (lambda one: one.status in ("completed", "failed", "expired", "cancelled"))
    deadline = time.monotonic() + 30
    while not ended(batch):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def records(client: OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
