"""LangChain: a chat model with a tool, and structured output.

pip install langchain-openai; python examples/langchain_client.py http://127.0.0.1:8000
"""

import sys
from typing import Literal

import httpx
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def water_level(city: Literal["Basel", "Vienna", "Budapest"]) -> str:
    """Level of a river at a city, in centimetres."""
    return {"Basel": "512", "Vienna": "241", "Budapest": "330"}[city]


class Report(BaseModel):
    """Whether a city is flooded."""

    city: Literal["Basel", "Vienna", "Budapest"]
    flood: bool


def main(url: str) -> None:
    """Chat, call the tool, and ask for a report."""
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=name, max_tokens=256)

    print("answer:", model.invoke("How long is the Rhine?", max_tokens=24).text)

    bound = model.bind_tools([water_level], tool_choice="water_level", strict=True)
    answer = bound.invoke("Is there a flood in Vienna?")
    [call] = answer.tool_calls
    print("call:", call["name"], call["args"], "->", water_level.invoke(call["args"]))

    print("report:", model.with_structured_output(Report).invoke("The level at Vienna is 241 cm."))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
