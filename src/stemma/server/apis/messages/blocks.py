"""From Anthropic's turns and content blocks to the messages of a chat."""

from __future__ import annotations

from typing import Any

import orjson

from stemma.errors import InvalidRequest
from stemma.model.vision.sources import image_url_part, text_part
from stemma.server.schemas.messages import CountTokensRequest, MessagesRequest, ToolChoice, Turn

ChatMessage = dict[str, Any]


def chat_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the body of the chat request that means the same as `body`. Raises InvalidRequest."""
    messages = chat_messages(body)
    ends_open = messages[-1]["role"] == "assistant"
    if ends_open and messages[-1].get("tool_calls"):
        message = "the last turn calls tools: their results must follow"
        raise InvalidRequest(message, param=f"messages[{len(body.messages) - 1}]")
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    effort, answer = _output_config(body.output_config)
    given: dict[str, Any] = {
        "messages": messages,
        "tools": [_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "include_reasoning": thinks,
        "chat_template_kwargs": {**(body.chat_template_kwargs or {}), "enable_thinking": thinks},
        "response_format": answer,
        "reasoning_effort": effort,
        "add_generation_prompt": not ends_open,
        "continue_final_message": ends_open,
    }
    if isinstance(body, MessagesRequest):
        given |= {name: getattr(body, name) for name in _SAME_FIELDS}
        given["model"] = body.model
        given["max_completion_tokens"] = body.max_tokens
        given["stop"] = body.stop_sequences
    return {name: value for name, value in given.items() if value is not None}


_SAME_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "ignore_eos",
    "cache_salt",
    "priority",
    "cache_ttl_s",
    "exact_history",
)
"""Fields that chat has under the same name."""


def chat_messages(body: CountTokensRequest) -> list[ChatMessage]:
    """Return system and turns as chat templates expect them."""
    messages: list[ChatMessage] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for number, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages[{number}].content")
    return messages


def _turn(turn: Turn, where: str) -> list[ChatMessage]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, where)]
    results: list[ChatMessage] = []
    others: list[tuple[Any, str]] = []
    for number, block in enumerate(turn.content):
        spot = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            results.append(_tool_result(block, spot))
        else:
            others.append((block, spot))
    # Results belong to the calls before them, so they come first, as Anthropic demands.
    if others or not results:
        results.append({"role": turn.role, "content": _parts(others)})
    return results


def _parts(blocks: list[tuple[Any, str]]) -> str | list[dict[str, Any]]:
    """Return the text of all blocks, each given with its place; with an image among them, a chat's parts."""
    if not any(isinstance(block, dict) and block.get("type") == "image" for block, _ in blocks):
        return "\n".join(_text_of(block, spot) for block, spot in blocks)
    return [
        image_url_part(_image_url(block, spot))
        if block.get("type") == "image"
        else text_part(_text_of(block, spot))
        for block, spot in blocks
    ]


def _image_url(block: dict[str, Any], where: str) -> str:
    """Return where an image block's image lies: most often in the URL itself."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise InvalidRequest(f"{where}.source must be of type base64 or url", param=f"{where}.source")
    if kind == "url":
        return _string(source, "url", f"{where}.source")
    media, data = (_string(source, name, f"{where}.source") for name in ("media_type", "data"))
    return f"data:{media.partition(',')[0]};base64,{data}"


def _assistant(blocks: list[dict[str, Any]], where: str) -> ChatMessage:
    message: ChatMessage = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        spot = f"{where}[{number}]"
        if block.get("type") == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise InvalidRequest(f"{spot}.input must be an object", param=f"{spot}.input")
            function = {
                "name": _string(block, "name", spot),
                "arguments": orjson.dumps(arguments).decode(),
            }
            calls.append({"id": _string(block, "id", spot), "type": "function", "function": function})
        elif block.get("type") == "thinking":
            thoughts.append(_string(block, "thinking", spot))
        elif block.get("type") != "redacted_thinking":
            texts.append(_text_of(block, spot))
    message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(block: dict[str, Any], where: str) -> ChatMessage:
    content, spot = block.get("content") or "", f"{where}.content"
    if isinstance(content, list):
        content = _parts([(one, f"{spot}[{number}]") for number, one in enumerate(content)])
    else:
        content = _text(content, spot)
    if block.get("is_error") is True:
        content = f"Error: {content}" if isinstance(content, str) else [text_part("Error: "), *content]
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": content}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text blocks", param=where)
    return "\n".join(_text_of(block, f"{where}[{number}]") for number, block in enumerate(content))


def _text_of(block: Any, where: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        kind = str(block.get("type"))[:64] if isinstance(block, dict) else type(block).__name__
        raise InvalidRequest(f"{where}: blocks of type {kind!r} are not supported here", param=where)
    return str(block["text"])


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def _tool(name: str, description: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "parameters": schema}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _output_config(config: dict[str, Any] | None) -> tuple[str | None, dict[str, Any] | None]:
    """Return (effort, response format)."""
    if config is None:
        return None, None
    effort, wanted = config.get("effort"), config.get("format")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest("output_config.effort must be a string", param="output_config.effort")
    if wanted is None:
        return effort, None
    is_schema = isinstance(wanted, dict) and wanted.get("type") == "json_schema"
    if not is_schema or not isinstance(wanted.get("schema"), dict):
        raise InvalidRequest(
            "output_config.format must be a json_schema with a schema", param="output_config.format"
        )
    schema = {"name": "answer", "schema": wanted["schema"], "strict": True}
    return effort, {"type": "json_schema", "json_schema": schema}
