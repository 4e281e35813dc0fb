"""OpenAI's client: the Responses API, with a conversation that the server remembers.

pip install openai; python examples/openai_responses.py http://127.0.0.1:8000
"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    """Ask, go on from the stored answer, and delete both."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    first = client.responses.create(
        model=model, input="Name three rivers of Europe, and say where they end.", max_output_tokens=32
    )
    print("answer:", first.output_text)

    with client.responses.stream(
        model=model, input="Which is longest?", previous_response_id=first.id, max_output_tokens=32
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="")
            elif event.type in ("response.completed", "response.incomplete"):
                second = event.response
    usage = second.usage
    print(f"\ncached: {usage.input_tokens_details.cached_tokens} of {usage.input_tokens} input tokens")

    client.responses.delete(first.id)
    client.responses.delete(second.id)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
