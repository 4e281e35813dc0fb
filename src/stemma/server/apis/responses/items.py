"""From the items of a Responses request to the messages of a chat, and the tools likewise."""

from __future__ import annotations

from typing import Any

from stemma.errors import InvalidRequest
from stemma.model.vision.sources import image_url_part, text_part
from stemma.server.schemas.responses import ResponsesRequest

ChatMessage = dict[str, Any]
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_messages(items: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """Return the messages that `items`, input or output, stand for. Raises InvalidRequest naming the item.

    Reasoning, text and calls of one answer become one message, as chat templates expect it.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[ChatMessage] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            messages.append({"role": "assistant", "reasoning_content": _reasoning(item, where)})
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            call_id = _string(item, "call_id", where)
            content = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise InvalidRequest(
                f"{where}: items of type {str(kind)[:64]!r} are not supported", param=f"{where}.type"
            )
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _add_message(messages: list[ChatMessage], item: dict[str, Any], where: str) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant" and (open_turn := _open_turn(messages)) is not None and "content" not in open_turn:
        open_turn["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[ChatMessage], item: dict[str, Any], where: str) -> None:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
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
    if not any(isinstance(part, dict) and part.get("type") == "input_image" for part in content):
        return "\n".join(_texts(content, where))
    return [
        image_url_part(_image_url(part, f"{where}[{number}]"))
        if isinstance(part, dict) and part.get("type") == "input_image"
        else text_part(*_texts([part], where))
        for number, part in enumerate(content)
    ]


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


def chat_fields(body: ResponsesRequest, messages: list[ChatMessage]) -> dict[str, Any]:
    """Return the body of the chat request that means the same as `body`, over `messages`."""
    reasoning = body.reasoning.effort if body.reasoning is not None else None
    template = dict(body.chat_template_kwargs or {})
    if reasoning == "none":
        template["enable_thinking"], reasoning = False, None
    given = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": reasoning,
        "chat_template_kwargs": template or None,
    }
    given |= {name: getattr(body, name) for name in _SAME_FIELDS}
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
)
"""Fields that chat has under the same name."""


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f"{where}: only tools of type 'function' are supported", param=where)
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return choice
    if choice.get("type") != "function":
        message = "tool_choice must be none, auto, required, a function or allowed_tools"
        raise InvalidRequest(message, param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


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
