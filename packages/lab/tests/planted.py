"""Sets of prompts for lint: clean ones, and each with one fault."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from stemma_lab.lint.edits import Rule

Body = dict[str, Any]
SYSTEM = (
    "You help the staff of a public library. Answer in the language of the question, in five sentences. "
    "Name the shelf where a book stands, and say so if it is lent. Never tell who has borrowed a book. "
    "If a reader asks for advice, ask back which two books they liked most, and why. "
    "Opening hours are on the door; don't repeat them. End each answer with a full stop."
)
QUESTIONS = (
    "Where do I find atlases of the moon?",
    "My daughter is nine and likes whales. What could she read?",
    "Is the second volume of the Danube history back on 12 May 2026 or on 19 May 2026?",
    "Anna Berg asked for 3 recipes with quinces, room 204.",
    "How long may I keep a film? My card is LIB-204-7781.",
    "Which book on bridges do engineers recommend?",
)
INSTRUCTIONS = (
    "\n\nAnswer the question above with the title, the author, the year and the shelf, each on its own line; "
    "leave a line empty where you don't know it, and add at the end how sure you are, from one to five."
)
NAMES = ("find_book", "is_lent", "reserve", "shelf_map")


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"title": {"type": "string", "description": f"what to {name}"}}}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Do {name} for a reader, by the title of a book.",
            "parameters": schema,
        },
    }


TOOLS = [tool(name) for name in NAMES]


def body(question: str, system: str = SYSTEM, tools: list[dict[str, Any]] | None = None, **more: Any) -> Body:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, **({"tools": tools} if tools else {}), **more}


def clean(*, tools: bool) -> list[Body]:
    """Single questions, then a conversation that grows."""
    given = TOOLS if tools else None
    found = [body(question, tools=given) for question in QUESTIONS]
    grown = body(QUESTIONS[0], tools=given)
    for answer, question in zip(("On shelf nine.", "Ask at the desk."), QUESTIONS[1:3], strict=True):
        more = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        grown = {**grown, "messages": [*grown["messages"], *more]}
        found.append(grown)
    return found


def _systems(head: Callable[[int], str]) -> list[Body]:
    return [body(question, head(n) + SYSTEM) for n, question in enumerate(QUESTIONS)]


def timestamp() -> list[Body]:
    start = datetime(2026, 5, 4, 8, 59, 30, tzinfo=UTC)
    return _systems(lambda n: f"It is {(start + timedelta(minutes=7 * n)):%Y-%m-%d %H:%M:%S} now. ")


def nonce() -> list[Body]:
    return _systems(lambda n: f"Request {hashlib.sha256(bytes([n])).hexdigest()[:24]} begins. ")


def counter() -> list[Body]:
    return _systems(lambda n: f"This is question {n + 41} of today. ")


def version() -> list[Body]:
    return _systems(lambda n: f"Instructions v2.{n // 2}.1 of the library. ")


def reordered() -> list[Body]:
    return [body(q, tools=TOOLS[n % 4 :] + TOOLS[: n % 4]) for n, q in enumerate(QUESTIONS)]


def changing() -> list[Body]:
    """A tool comes and goes before the others."""
    return [body(q, tools=TOOLS[n % 2 :]) for n, q in enumerate(QUESTIONS)]


def user_text() -> list[Body]:
    return [body(question + INSTRUCTIONS) for question in QUESTIONS]


def image() -> list[Body]:
    found = []
    for number in range(len(QUESTIONS)):
        url = f"data:image/png;base64,{'A' * (4 * number + 4)}"
        found.append(
            body("")
            | {
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": url}},
                            {"type": "text", "text": INSTRUCTIONS.strip()},
                        ],
                    },
                ]
            }
        )
    return found


def image_last() -> list[Body]:
    """As it should be."""
    found = image()
    for one in found:
        one["messages"][1]["content"].reverse()
    return found


FAULTS: dict[Rule, Callable[[], list[Body]]] = {
    Rule.TIMESTAMP: timestamp,
    Rule.NONCE: nonce,
    Rule.COUNTER: counter,
    Rule.TEMPLATE: version,
    Rule.TOOLS_REORDERED: reordered,
    Rule.TOOLS_CHANGED: changing,
    Rule.USER_TEXT: user_text,
    Rule.IMAGE: image,
}


def lines(bodies: list[Body]) -> str:
    return "".join(json.dumps(one) + "\n" for one in bodies)
