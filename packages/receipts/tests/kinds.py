"""Prompts and ways to draw of all kinds, for receipts: a sample in the tests, a thousand in the benchmark."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packages.receipts.tests.signing import Receipt, SigningServer

WORDS = ("harbour", "lantern", "seven", "maps", "of", "the", "old", "river", "a", "ferry", "leaves", "noon")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def text(chance: random.Random) -> str:
    """Words that repeat, so that drafts hold and prefixes are shared."""
    head = " ".join(WORDS) if chance.random() < 0.5 else ""
    return f"{head} {' '.join(chance.choices(WORDS, k=chance.randint(3, 30)))}"


def drawing(chance: random.Random) -> dict[str, Any]:
    """One way to draw."""
    found: dict[str, Any] = {
        "temperature": chance.choice((0, 0, 1, 0.7)),
        "max_tokens": chance.randint(4, 48),
    }
    more: list[dict[str, Any]] = [
        {},
        {},
        {"top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.3},
        {"n": 3, "temperature": 1},
        {"stop": ["e"]},
        {"min_tokens": 3, "logit_bias": {"101": 3.0}},
        {"guided_json": SCHEMA},
        {"guided_regex": "[a-m ]{4,20}"},
        {"ignore_eos": True},
    ]
    return found | chance.choice(more)


def texts(server: SigningServer, count: int, models: list[str]) -> Iterator[Receipt]:
    """Receipts of completions, by one of `models` each."""
    chance = random.Random(count)
    for _ in range(count):
        yield server.complete(text(chance), model=chance.choice(models), **drawing(chance))


def pictures(server: SigningServer, count: int, files: list[Path]) -> Iterator[Receipt]:
    """Receipts of chats with one or two of the pictures."""
    chance = random.Random(count)
    for _ in range(count):
        chosen = chance.sample(files, chance.randint(1, 2))
        parts: list[dict[str, Any]] = [{"type": "text", "text": text(chance)[:80]}]
        for file in chosen:
            url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        body = {"messages": [{"role": "user", "content": parts}], "temperature": chance.choice((0, 1))}
        answer = server.post("/v1/chat/completions", max_tokens=chance.randint(3, 16), **body).json()
        yield from answer["usage"]["stemma"]["receipts"]
