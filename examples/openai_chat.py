"""OpenAI's client: a chat, whole and streamed, and what the prefix cache saved.

pip install openai; python examples/openai_chat.py http://127.0.0.1:8000
"""

import sys

from openai import OpenAI

RULES = "You answer questions about rivers. Be short, name your source, and give lengths in kilometres. " * 4


def main(url: str) -> None:
    """Ask the same rules two questions: the second finds the rules in the cache."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    system = {"role": "system", "content": RULES}

    first = client.chat.completions.create(
        model=model, messages=[system, {"role": "user", "content": "How long is the Rhine?"}], max_tokens=32
    )
    print("answer:", first.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=[system, {"role": "user", "content": "And the Danube?"}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    print("stream: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="")
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\ncached: {cached} of {chunk.usage.prompt_tokens} prompt tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
