"""From the items of a Responses request to the messages of a chat, and the tools likewise."""

from __future__ import annotations

from typing import Any

import orjson

from stemma.errors import InvalidRequest
from stemma.model.vision.sources import image_url_part, text_part
from stemma.server.answers.formats.forced import TextGrammar
from stemma.server.apis.responses.calls import CALL_ITEMS, function_of
from stemma.server.apis.responses.tools import Offered, chosen, offered_tools
from stemma.server.schemas.responses import ITEMS, ResponsesRequest

ChatMessage = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_OUTPUTS = frozenset(
    {
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    }
)


def chat_messages(items: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """Return the messages that `items`, input or output, stand for. Raises InvalidRequest naming the item.

    Reasoning, text and calls of one answer become one message, as chat templates expect it. Items that are
    no part of a prompt are left out (`ITEMS`).
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[ChatMessage] = []
    for number, item in enumerate(items):
        if ITEMS.speaks(item):
            _add(messages, item, f"input[{number}]")
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _add(messages: list[ChatMessage], item: dict[str, Any], where: str) -> None:
    kind = ITEMS.kind(item)
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "reasoning":
        if text := _reasoning(item, where):
            messages.append({"role": "assistant", "reasoning_content": text})
    elif kind in CALL_ITEMS:
        _add_call(messages, item, where)
    elif kind in _OUTPUTS:
        call_id = item.get("call_id") or item.get("id")  # local_shell_call_output has no call_id
        if not isinstance(call_id, str):
            raise InvalidRequest(f"{where}.call_id must be a string", param=f"{where}.call_id")
        content = _output(item, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "agent_message":
        messages.append({"role": "user", "content": _content(item.get("content"), f"{where}.content")})


def _output(item: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
    """Return what a call gave. The outputs of a shell are a list of objects: their JSON is the text."""
    given = item.get("output")
    if given is None:
        return str(item.get("status") or "")
    if item["type"] == "shell_call_output" and not isinstance(given, str):
        return orjson.dumps(given).decode()
    return _content(given, where)


def _add_message(messages: list[ChatMessage], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant" and (open_turn := _open_turn(messages)) is not None and "content" not in open_turn:
        open_turn["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[ChatMessage], item: dict[str, Any], where: str) -> None:
    if item.get("type") in ("function_call", "custom_tool_call"):
        _string(item, "name", where)
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function_of(item)}
    turn = _open_turn(messages)
    if turn is None:
        turn = {"role": "assistant"}
        messages.append(turn)
    turn.setdefault("tool_calls", []).append(call)


def _open_turn(messages: list[ChatMessage]) -> ChatMessage | None:
    """Return the assistant's message that further items belong to."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _reasoning(item: dict[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise InvalidRequest(f"{where}.content must be a list", param=f"{where}.content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the text of all parts; with an image among them, a chat's parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    content = [part for part in content if not _is_sealed(part)]
    if not any(isinstance(part, dict) and part.get("type") == "input_image" for part in content):
        return "\n".join(_texts(content, where))
    return [
        image_url_part(_image_url(part, f"{where}[{number}]"))
        if isinstance(part, dict) and part.get("type") == "input_image"
        else text_part(*_texts([part], where))
        for number, part in enumerate(content)
    ]


def _is_sealed(part: Any) -> bool:
    """Whether only OpenAI can read a part."""
    return isinstance(part, dict) and part.get("type") == "encrypted_content"


def _image_url(part: dict[str, Any], where: str) -> str:
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{where}: input_image needs an image_url, not a file", param=where)
    return url


def _texts(parts: list[Any], where: str) -> list[str]:
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise InvalidRequest(
                f"{where}[{number}]: only text parts and input_image are supported",
                param=f"{where}[{number}]",
            )
        texts.append(text)
    return texts


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def tools_of(body: ResponsesRequest) -> Offered:
    """Return the tools that a model is offered, those in items too. Raises InvalidRequest."""
    items = body.input if isinstance(body.input, list) else []
    added = [item["tools"] for item in items if item.get("type") == "additional_tools" and "tools" in item]
    lists = [body.tools or [], *(tools for tools in added if isinstance(tools, list))]
    return offered_tools([tool for tools in lists for tool in tools])


def text_grammars(body: ResponsesRequest) -> dict[str, TextGrammar]:
    """Return the forms of the texts that tools take, by the names that a model calls."""
    return {
        name: TextGrammar("lark" if kind == "grammar" else "regex", definition)
        for name, tool in tools_of(body).items()
        for kind, definition in (tool.grammar or {}).items()
    }


def chat_fields(body: ResponsesRequest, messages: list[ChatMessage]) -> dict[str, Any]:
    """Return the body of the chat request that means the same as `body`, over `messages`."""
    offered = tools_of(body)
    choice, forced = chosen(body.tool_choice, offered)
    given: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": dict(tool.function)} for tool in offered.values()] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "thinking_token_budget": None if body.reasoning is None else body.reasoning.max_tokens,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    given |= {name: getattr(body, name) for name in _SAME_FIELDS}
    if forced is not None:
        given["structured_outputs"] = forced.grammar
    return {name: value for name, value in given.items() if value is not None}


_SAME_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "structured_outputs",
    "cache_salt",
    "prompt_cache_key",
    "session_id",
    "priority",
    "cache_ttl_s",
    "exact_history",
    "kv_hints",
    "prompt_cache_options",
    "prompt_cache_retention",
)
"""Fields that chat has under the same name."""


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return {"type": "json_object"}
    if wanted.get("type") == "json_schema" and isinstance(wanted.get("schema"), dict):
        names = ("name", "description", "schema", "strict")
        schema = {name: wanted[name] for name in names if wanted.get(name) is not None}
        return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
    raise InvalidRequest(
        "text.format must have the type text, json_object, or json_schema with a schema", param="text.format"
    )
