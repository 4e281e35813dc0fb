"""Where the prompt lies in a request's body, in each protocol: all that a proxy has to know of them.

What a proxy reads here decides only where a request goes, never what the answer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_TRITON = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/generate",
    "/generate_stream",
    "/infer",
    "/infer_token",
    "/",
    *(f"{model}/{verb}" for model in _TRITON for verb in ("infer", "generate", "generate_stream")),
)
"""Paths whose requests generate, as patterns of Starlette's routes."""
POOLED = ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")
"""Paths whose requests compute prompts alone."""

PROMPT_FIELDS = (
    "model",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "enable_thinking",
    "thinking",
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields of a chat beside its messages that its prompt depends on."""
_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
_ANSWERS = ("n", "best_of")
_HEAD_LENGTH = 1024
"""Characters, or token ids, of a plain prompt."""
_IMAGES = ("image_url", "image", "input_image")
"""Types of the parts of messages that are images, in OpenAI's, Anthropic's and the Responses API."""
_IMAGE_CHARACTERS = 4096
"""What an image may cost, as if it were text: what its file takes says nothing of that."""


def messages_of(body: Mapping[str, Any]) -> list[Any] | None:
    """Return a conversation as chat messages: of OpenAI's, Anthropic's or the Responses API's body."""
    messages, system = body.get("messages"), body.get("system")
    if not isinstance(messages, list):
        messages, system = body.get("input"), body.get("instructions")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list):
            return None
    return messages if not system else [{"role": "system", "content": system}, *messages]


def adapter_of(body: Mapping[str, Any]) -> str | None:
    """Return the name that may be an adapter's: OpenAI's model, TGI's `adapter_id`."""
    parameters = body.get("parameters")
    places = (parameters.get("adapter_id") if isinstance(parameters, dict) else None, body.get("model"))
    return next((name for name in places if isinstance(name, str) and name), None)


def tokens_of(body: Mapping[str, Any]) -> list[int] | None:
    """Return the token ids that a body gives as its prompt."""
    for name in ("prompt", "inputs", "input_id"):
        given = body.get(name)
        if isinstance(given, list) and given and all(isinstance(one, int) for one in given):
            return given
    return None


def text_of(body: Mapping[str, Any]) -> str | None:
    """Return the text that a body gives as its prompt."""
    for name in ("prompt", "inputs", "text_input"):
        given = body.get(name)
        if isinstance(given, str):
            return given
    return None


def head_of(body: Mapping[str, Any] | None) -> bytes:
    """Return the beginning of a request's prompt: of a conversation everything up to the first question.

    An image in it ends it, so that other questions about the image come to the same place.
    """
    if body is None:
        return b""
    messages = messages_of(body)
    if messages is not None:
        roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
        end = roles.index("user") + 1 if "user" in roles else 1
        return orjson.dumps(_up_to_image(messages[:end]))
    prompt = text_of(body) or tokens_of(body) or body.get("prompt", body.get("inputs"))
    return orjson.dumps(prompt[:_HEAD_LENGTH] if isinstance(prompt, str | list) else prompt)


def pooled_head_of(body: Mapping[str, Any]) -> bytes:
    """Return what the prompts of a request to one of `POOLED` begin with: a query, or the first text."""
    given = next((body[name] for name in ("query", "text_1", "input") if name in body), None)
    first = given[0] if isinstance(given, list) and given and not isinstance(given[0], int) else given
    return orjson.dumps(first[:_HEAD_LENGTH] if isinstance(first, str | list) else first)


def num_characters(body: Mapping[str, Any]) -> int:
    """Return the length of the prompt as JSON: what it may cost, where its tokens aren't known."""
    given = messages_of(body)
    if given is None:
        return len(orjson.dumps(body.get("prompt", body.get("inputs", ""))))
    without = [_without_images(one) for one in given]
    num_images = sum(num for _, num in without)
    return len(orjson.dumps([one for one, _ in without])) + num_images * _IMAGE_CHARACTERS


def has_images(messages: list[Any]) -> bool:
    """Return whether a conversation's messages hold images: only a server of the model knows their tokens."""
    return any(_without_images(one)[1] for one in messages)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGES


def _without_images(message: Any) -> tuple[Any, int]:
    """Return a message without its images, and their number. Images in results of tools count as text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message, 0
    others = [part for part in content if not _is_image(part)]
    return {**message, "content": others}, len(content) - len(others)


def _up_to_image(messages: list[Any]) -> list[Any]:
    """Return messages up to the first image in them, that included."""
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if _is_image(part):
                return [*messages[:number], {**message, "content": content[: place + 1]}]
    return messages


def is_streamed(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether an answer comes as it is generated, so that its first byte ends the prefill."""
    return body.get("stream") is True or path.endswith("_stream")


def max_output_of(body: Mapping[str, Any]) -> int | None:
    """Return the tokens that a request's answers may have together; None: it doesn't say."""
    parameters = body.get("parameters")
    places = (body, parameters) if isinstance(parameters, dict) else (body,)
    limits = [count for place in places for count in _counts(place, _OUTPUT_LIMITS)]
    answers = [count for place in places for count in _counts(place, _ANSWERS)]
    return max(limits) * max([1, *answers]) if limits else None


def _counts(place: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    given = [place[name] for name in names if name in place]
    return [one for one in given if type(one) is int and 0 <= one < 2**31]


def num_output_of(answer: Any) -> int | None:
    """Return the tokens that a whole answer says it has, in OpenAI's, Anthropic's or TGI's words."""
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    counts = _counts(_part(answer, "usage"), ("completion_tokens", "output_tokens"))
    counts += _counts(_part(answer, "details"), ("generated_tokens",))
    return counts[0] if counts else None


def num_cached_of(answer: Any) -> int | None:
    """Return the prompt tokens that a whole answer says were cached, in OpenAI's or Anthropic's words."""
    usage = _part(answer, "usage")
    details = (_part(usage, name) for name in ("prompt_tokens_details", "input_tokens_details"))
    counts = [count for one in details for count in _counts(one, ("cached_tokens",))]
    counts += _counts(usage, ("cache_read_input_tokens",))
    return counts[0] if counts else None


def _part(whole: Any, name: str) -> dict[str, Any]:
    """Return an object in an answer; an empty one if there is none."""
    part = whole.get(name) if isinstance(whole, dict) else None
    return part if isinstance(part, dict) else {}


def one_token_body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request that computes the same prompt and generates one token, without streaming."""
    short = {**body, "stream": False}
    for name in ("stream_options", "logprobs", "top_logprobs", "best_of", "prompt_logprobs", "details"):
        short.pop(name, None)
    if not {"inputs", "input_id", "text_input"}.isdisjoint(body):
        parameters = body.get("parameters") or {}
        dropped = ("details", "decoder_input_details")
        kept = {name: value for name, value in parameters.items() if name not in dropped}
        return {**short, "parameters": {**kept, "max_new_tokens": 1}}
    if path == "/v1/responses":
        return {**short, "max_output_tokens": 1, "store": False}
    short["max_completion_tokens" if "max_completion_tokens" in short else "max_tokens"] = 1
    if path == "/v1/messages":
        return short
    short["n"] = 1
    short.pop("min_tokens", None)
    return short
