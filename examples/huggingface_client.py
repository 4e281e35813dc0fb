"""Hugging Face's InferenceClient: TGI's shape and chat.

pip install huggingface_hub; python examples/huggingface_client.py http://127.0.0.1:8000
"""

import sys

from huggingface_hub import InferenceClient


def main(url: str) -> None:
    """Generate, stream, chat."""
    client = InferenceClient(url)

    answer = client.text_generation("The river", max_new_tokens=24, details=True)
    print("answer:", answer.generated_text, "-", answer.details.generated_tokens, "tokens")

    print("stream:", "".join(client.text_generation("The river", max_new_tokens=24, stream=True)))

    chat = client.chat_completion([{"role": "user", "content": "How long is the Rhine?"}], max_tokens=24)
    print("chat:", chat.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
