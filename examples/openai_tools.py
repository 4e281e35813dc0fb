"""OpenAI's client: a tool that the model must call, and an answer parsed into a pydantic model.

pip install openai; python examples/openai_tools.py http://127.0.0.1:8000
"""

import json
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

City = Literal["Basel", "Vienna", "Budapest"]
TOOL = {
    "type": "function",
    "function": {
        "name": "water_level",
        "description": "Level of a river at a city, in centimetres.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Basel", "Vienna", "Budapest"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LEVELS = {"Basel": 512, "Vienna": 241, "Budapest": 330}


class Report(BaseModel):
    """What the answer must look like."""

    city: City
    flood: bool


def main(url: str) -> None:
    """Let the model call the tool, tell it the result, and ask for a report."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Is there a flood on the Danube in Vienna?"}]

    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    [call] = answer.choices[0].message.tool_calls
    city = json.loads(call.function.arguments)["city"]
    print("call:", call.function.name, city)

    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{LEVELS[city]} cm"})
    report = client.chat.completions.parse(model=model, messages=messages, response_format=Report)
    print("report:", report.choices[0].message.parsed)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
