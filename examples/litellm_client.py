"""LiteLLM, with Stemma as an OpenAI-like server. It needs openai below 3: give it an environment of its own.

pip install litellm; python examples/litellm_client.py http://127.0.0.1:8000
"""

import json
import os
import sys
from urllib.request import urlopen

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download at import
import litellm

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Vienna", "Budapest"]}, "flood": {"type": "boolean"}},
    "required": ["city", "flood"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Chat, whole and streamed, and an answer that follows a schema."""
    with urlopen(f"{url}/v1/models") as answer:
        model = "openai/" + json.load(answer)["data"][0]["id"]
    server = {"model": model, "api_base": f"{url}/v1", "api_key": "none"}
    messages = [{"role": "user", "content": "Is there a flood in Vienna?"}]

    whole = litellm.completion(**server, messages=messages, max_tokens=24)
    print("answer:", whole.choices[0].message.content)

    stream = litellm.completion(**server, messages=messages, max_tokens=24, stream=True)
    print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

    wanted = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}
    report = litellm.completion(**server, messages=messages, max_tokens=256, response_format=wanted)
    print("report:", json.loads(report.choices[0].message.content))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
