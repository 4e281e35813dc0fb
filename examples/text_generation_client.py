"""TGI's own client. It needs huggingface_hub below 1.0, so give it an environment of its own.

pip install text-generation; python examples/text_generation_client.py http://127.0.0.1:8000
"""

import sys

from text_generation import Client


def main(url: str) -> None:
    """Generate, whole and streamed."""
    client = Client(url)

    answer = client.generate("The river", max_new_tokens=24)
    print("answer:", answer.generated_text, "-", answer.details.generated_tokens, "tokens")

    pieces = [part.token.text for part in client.generate_stream("The river", max_new_tokens=24)]
    print("stream:", "".join(pieces))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
