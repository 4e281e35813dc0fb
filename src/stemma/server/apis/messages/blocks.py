"""From Anthropic's turns and content blocks to the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from stemma.errors import InvalidRequest
from stemma.model.vision.sources import image_url_part, text_part
from stemma.server.apis.messages.tools import chat_tools, tool_choice
from stemma.server.schemas.messages import BLOCKS, CountTokensRequest, InputTurn, MessagesRequest
from stemma.server.schemas.shared import PromptCacheOptions

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
        "tools": chat_tools(body.tools or ()) or None,
        "tool_choice": tool_choice(body.tool_choice),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "include_reasoning": thinks,
        "enable_thinking": thinks,
        "thinking_token_budget": body.thinking.budget_tokens
        if thinks and body.thinking is not None
        else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": answer,
        "reasoning_effort": effort,
        "add_generation_prompt": not ends_open,
        "continue_final_message": ends_open,
    }
    if isinstance(body, MessagesRequest):
        given |= {name: getattr(body, name) for name in _SAME_FIELDS}
        given["model"] = body.model
        given["max_completion_tokens"] = body.max_tokens or 1
        if not body.max_tokens:
            given["prompt_cache_options"] = PromptCacheOptions(prewarm=True)
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
    "kv_hints",
    "prompt_cache_options",
    "prompt_cache_retention",
)
"""Fields that chat has under the same name."""


def chat_messages(body: CountTokensRequest) -> list[ChatMessage]:
    """Return system and turns as chat templates expect them."""
    messages: list[ChatMessage] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _system(body.system)})
    for number, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages[{number}].content")
    return messages


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(_text_of(*one) for one in _spoken(system, "system"))


def _spoken(blocks: Sequence[Any], where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the blocks that are part of the prompt, each with its place."""
    for number, block in enumerate(blocks):
        spot = f"{where}[{number}]"
        treatment = BLOCKS.treatment(block) if isinstance(block, dict) else "refused"
        if treatment == "refused":  # inside of others; those of a turn were looked at before
            raise InvalidRequest(f"{spot}: this block is not supported here", param=spot)
        if treatment == "spoken":
            yield block, spot


def _turn(turn: InputTurn, where: str) -> list[ChatMessage]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    blocks = list(_spoken(turn.content, where))
    if turn.role == "assistant":
        return [_assistant(blocks)]
    results = [_tool_result(block, spot) for block, spot in blocks if block.get("type") == "tool_result"]
    others = [(block, spot) for block, spot in blocks if block.get("type") != "tool_result"]
    # Results belong to the calls before them, so they come first, as Anthropic demands.
    if others or not results:
        results.append({"role": turn.role, "content": _parts(others)})
    return results


def _parts(blocks: list[tuple[dict[str, Any], str]]) -> str | list[dict[str, Any]]:
    """Return the text of all blocks, each given with its place; with an image among them, a chat's parts."""
    if not any(block.get("type") == "image" for block, _ in blocks):
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


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> ChatMessage:
    message: ChatMessage = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, spot in blocks:
        match block.get("type"):
            case "tool_use":
                calls.append(_call(block, spot))
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case _:
                texts.append(_text_of(block, spot))
    message["content"] = "\n".join(texts)
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict | str):
        raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    function = {"name": _string(block, "name", where), "arguments": text}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], where: str) -> ChatMessage:
    content, spot = block.get("content") or "", f"{where}.content"
    if isinstance(content, list):
        content = _parts(list(_spoken(content, spot)))
    elif not isinstance(content, str):
        raise InvalidRequest(f"{spot} must be a string or a list of blocks", param=spot)
    if block.get("is_error") is True:
        content = f"Error: {content}" if isinstance(content, str) else [text_part("Error: "), *content]
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": content}


def _text_of(block: dict[str, Any], where: str) -> str:
    """Return the text that a block holds. Raises InvalidRequest if it holds none."""
    match block.get("type"):
        case "document":
            return _lines(block.get("title"), block.get("context"), _source_text(block, where))
        case "search_result":
            content = block.get("content")
            inner = _spoken(content if isinstance(content, list) else [], f"{where}.content")
            texts = [_text_of(*one) for one in inner]
            return _lines(block.get("title"), block.get("source"), *texts)
        case "tool_reference":
            return _string(block, "tool_name", where)
        case "compaction":
            return str(block.get("content") or "")
        case "tool_use" | "tool_result" | "thinking" | "image":
            kind = block.get("type")
            raise InvalidRequest(f"{where}: blocks of type {kind!r} don't belong here", param=where)
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _source_text(block: dict[str, Any], where: str) -> str:
    """Return a document's text. Raises InvalidRequest for files, which this server can't read."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "text":
        return _string(source, "data", f"{where}.source")
    if isinstance(source, dict) and kind == "content":
        content = source.get("content")
        if not isinstance(content, list):
            return str(content or "")
        return _lines(*(_text_of(*one) for one in _spoken(content, f"{where}.source.content")))
    raise InvalidRequest(f"{where}.source must be of type text or content", param=f"{where}.source")


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


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
