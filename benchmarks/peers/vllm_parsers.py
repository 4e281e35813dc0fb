"""Read answers with vLLM's parsers of calls: `python vllm_parsers.py CASES`, in an environment with vLLM.

CASES is a file of JSON: `tools`, `markers`, `texts` ([parser, text] pairs). Prints one line of JSON: for each
text `whole` and `stream`, the calls ([name, arguments] pairs) of the two ways to read it, or an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tokenizer_with(markers: list[str]) -> Any:
    """Return a tokenizer of single bytes, and of markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|eos|>")  # type: ignore[no-untyped-call]
    made.add_tokens(markers)
    return made


def whole(parser: Any, tokenizer: Any, request: Any, text: str) -> list[list[str]]:
    """Return the calls of a whole answer."""
    found = parser.extract_tool_calls(text, request)
    return [[call.function.name, call.function.arguments] for call in found.tool_calls]


def streamed(parser: Any, tokenizer: Any, request: Any, text: str) -> list[list[str]]:
    """Return the calls of an answer that comes token by token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    told, before = "", list[int]()
    calls: dict[int, list[str]] = {}
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:end])
        if now.endswith("\ufffd"):
            continue
        new = ids[len(before) : end]
        message = parser.extract_tool_calls_streaming(
            told, now, now[len(told) :], before, ids[:end], new, request
        )
        told, before = now, ids[:end]
        gather(calls, message)
    return [calls[index] for index in sorted(calls)]


def harmony(request: Any, text: str, *, is_whole: bool) -> list[list[str]]:
    """Return the calls of an answer of GPT-OSS, which vLLM reads by the ids of its vocabulary."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    HarmonyParser.tool_parser_cls = GptOssToolParser
    encoding = get_encoding()
    ids = encoding.encode(f"{text}<|call|>", allowed_special="all")
    parser = HarmonyParser(encoding, request.tools)
    if is_whole:
        found = parser.parse(text, request, True, ids)[2]
        return [[call.name, call.arguments] for call in found or ()]
    calls: dict[int, list[str]] = {}
    for number, each in enumerate(ids, 1):
        message = parser.parse_delta("", [each], request, finished=number == len(ids))
        gather(calls, message)
    return [calls[index] for index in sorted(calls)]


def gather(calls: dict[int, list[str]], message: Any) -> None:
    """Add what a message of a stream brings to calls."""
    for each in (message.tool_calls or ()) if message is not None else ():
        call = calls.setdefault(each.index, ["", ""])
        call[0] += (each.function.name or "") if each.function else ""
        call[1] += (each.function.arguments or "") if each.function else ""


def main() -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    given = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = tokenizer_with(given["markers"])
    user = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest(model="m", messages=user, tools=given["tools"])

    def read(name: str, text: str, way: Callable[..., list[list[str]]]) -> dict[str, Any]:
        try:
            if name == "harmony":
                return {"calls": harmony(request, text, is_whole=way is whole)}
            parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
            return {"calls": way(parser, tokenizer, request, text)}
        except Exception as error:  # noqa: BLE001 - theirs to raise
            return {"error": repr(error)[:200]}

    answers = [
        {"whole": read(name, text, whole), "stream": read(name, text, streamed)}
        for name, text in given["texts"]
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
