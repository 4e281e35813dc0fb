"""Conversations with a live server that don't fit in its cache."""

from __future__ import annotations

import random

import httpx

BLOCK_SIZE = 16


def chat(client: httpx.Client, num_requests: int) -> None:
    """Conversations behind one system prompt that together don't fit in the cache."""
    random.seed(4)
    system = {"role": "system", "content": "You answer briefly. " * 12}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(10)]
    for number in range(num_requests):
        talk = random.choice(talks)
        if len(talk) > 12:
            del talk[1:]
        words = " ".join(f"w{random.randrange(300)}" for _ in range(random.randrange(5, 25)))
        talk.append({"role": "user", "content": f"Question {number}: {words}"})
        body = {"model": "tiny", "messages": talk, "max_tokens": 6, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        talk.append(
            {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or "-"}
        )
