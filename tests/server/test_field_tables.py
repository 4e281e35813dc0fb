"""docs/compatibility.md names every field that the schemas know, and every field of the official clients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.messages import MessagesRequest
from stemma.server.schemas.openai import ChatRequest, CompletionRequest
from stemma.server.schemas.responses import ResponsesRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
SECTIONS: list[tuple[str, tuple[type[RequestModel], ...]]] = [
    ("OpenAI's chat and completions", (ChatRequest, CompletionRequest)),
    ("OpenAI's Responses API", (ResponsesRequest,)),
    ("Anthropic's Messages API", (MessagesRequest,)),
]


def rows(title: str) -> dict[str, str]:
    """Return what the section's tables say of each field."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(title + "\n"))
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            fields, says = line.strip("| ").split(" | ", 1)
            for field in re.findall(r"`([a-z_.]+)`", fields):
                found.setdefault(field, says)
                found.setdefault(field.partition(".")[0], says)
    return found


@pytest.mark.parametrize(("title", "models"), SECTIONS)
def test_every_field_of_the_schemas_is_in_its_table(
    title: str, models: tuple[type[RequestModel], ...]
) -> None:
    says = rows(title)
    names = {name for model in models for name in model.known_names()}
    assert names - says.keys() == set()
    for model in models:
        for name in model.refused.keys() - {"echo"}:
            assert "refused" in says[name], name
        for name in model.harmless:
            assert "accepted without effect" in says[name], name
        for name in model.model_fields.keys() - {"metadata", "include", "echo"}:
            if not name.endswith("_"):
                assert says[name].startswith(("works", "the served one")), name


@pytest.mark.parametrize(
    ("params", "model"),
    [(ChatParams, ChatRequest), (CompletionParams, CompletionRequest), (ResponseParams, ResponsesRequest)],
)
def test_every_field_of_openais_client_is_known(params: type, model: type[RequestModel]) -> None:
    """A new version of the client with a new field: decide what it does here, and say so."""
    assert set(params.__annotations__) - model.known_names() == set()


def test_every_field_of_anthropics_client_is_known() -> None:
    params = pytest.importorskip("anthropic.types.message_create_params").MessageCreateParamsBase
    assert set(params.__annotations__) - MessagesRequest.known_names() == set()
