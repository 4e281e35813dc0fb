"""Anthropic's client: a marked prefix, a stream, a tool.

pip install anthropic; python examples/anthropic_messages.py http://127.0.0.1:8000
"""

import sys

from anthropic import Anthropic

RULES = "You answer questions about rivers. Be short, name your source, and give lengths in kilometres. " * 4
SYSTEM = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
TOOL = {
    "name": "water_level",
    "description": "Level of a river at a city, in centimetres.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Basel", "Vienna", "Budapest"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url: str) -> None:
    """Ask twice under the same marked system text, then let the model call a tool."""
    client = Anthropic(base_url=url, api_key="none")
    model = "dummy"  # the one that is served

    first = client.messages.create(
        model=model,
        max_tokens=32,
        system=SYSTEM,
        messages=[{"role": "user", "content": "How long is the Rhine?"}],
    )
    print("answer:", first.content[0].text)
    print("written to the cache:", first.usage.cache_creation_input_tokens)

    with client.messages.stream(
        model=model,
        max_tokens=32,
        system=SYSTEM,
        messages=[{"role": "user", "content": "And the Danube?"}],
    ) as stream:
        print("stream:", "".join(stream.text_stream))
        print("read from the cache:", stream.get_final_message().usage.cache_read_input_tokens)

    answer = client.messages.create(
        model=model,
        max_tokens=256,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "water_level"},
        messages=[{"role": "user", "content": "Is there a flood in Vienna?"}],
    )
    print("call:", answer.content[-1].name, answer.content[-1].input)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
