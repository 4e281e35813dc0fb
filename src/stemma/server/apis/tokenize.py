"""The tokenizer over HTTP: ``/tokenize`` (vLLM's and TGI's), ``/detokenize``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma import __version__
from stemma.errors import InvalidRequest
from stemma.model.vision.prompt import vocabulary_ids
from stemma.server.door.answer_memory import ENTRY_BYTES, LISTED_ID_BYTES
from stemma.server.door.entry import hold
from stemma.server.door.ledger import Admission
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import takes
from stemma.server.routes import TENANT, Router
from stemma.server.schemas.openai import ChatRequest
from stemma.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.models import check_model
from stemma.server.turn.prompts import chat_prompt, check_length

router = Router(openai_error)


@router.get("/version", TENANT)
async def server_version(request: Request) -> Response:
    """The version of Stemma."""
    return json_response({"version": __version__})


@router.post("/tokenize", TENANT, openapi_extra=takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of ``prompt`` or ``messages`` (vLLM), or of ``inputs`` (TGI: with texts)."""
    context = context_of(request)
    raw = await read_object(request)
    body = validate(TokenizeRequest, raw)
    check_model(context.engine, body.model or context.engine.model_name)
    if sum(each is not None for each in (body.prompt, body.inputs, body.messages)) != 1:
        raise InvalidRequest("give one of prompt, messages and inputs", param="prompt")
    return json_response(await _tokenized(request, body, raw))


async def _tokenized(request: Request, body: TokenizeRequest, raw: dict[str, Any]) -> Any:
    context, special = context_of(request), body.add_special_tokens is not False
    if body.inputs is not None:
        ids = await encoded(request, body.inputs, "inputs", add_special_tokens=special)
        return _tgi_tokens(ids, await token_texts(request, ids, "inputs"))
    if body.prompt is not None:
        ids = await encoded(request, body.prompt, "prompt", add_special_tokens=special)
    else:
        prompt = await chat_prompt(context.intake, _as_chat(context, raw))
        ids = vocabulary_ids(prompt.token_ids, prompt.images).tolist()
    texts = await token_texts(request, ids, "return_token_strs") if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": context.engine.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }


@router.post("/detokenize", TENANT, openapi_extra=takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    context = context_of(request)
    body = validate(DetokenizeRequest, await read_object(request))
    check_model(context.engine, body.model or context.engine.model_name)
    tokenizer = context.engine.tokenizer
    highest = max(body.tokens, default=0)
    if highest >= tokenizer.vocab_size:
        raise InvalidRequest(f"{highest} is no token id of this model", param="tokens")
    admission: Admission = request.app.state.admission
    hold(request, "tokens", admission.token.each * len(body.tokens))
    text = await context.intake.tokenize_in_thread(
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})


async def encoded(request: Request, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text: as many as it has bytes, at most."""
    context = context_of(request)
    check_length(context.intake, len(text), param)
    hold(request, param, LISTED_ID_BYTES * len(text.encode(errors="replace")))
    tokenizer = context.engine.tokenizer
    ids = await context.intake.tokenize_in_thread(
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )
    found: list[int] = ids.tolist()
    return found


def _as_chat(context: ApiContext, raw: dict[str, Any]) -> ChatRequest:
    """Return the body as a chat request, whose prompt is what is asked for."""
    return validate(ChatRequest, {"model": context.engine.model_name, **raw})


async def token_texts(request: Request, ids: list[int], param: str) -> list[str]:
    """Return the text of each token; off the event loop, as a prompt may have a million of them."""
    context = context_of(request)
    hold(request, param, ENTRY_BYTES * len(ids))
    return await context.intake.in_thread(lambda: [context.token_text(each) for each in ids])


def _tgi_tokens(ids: list[int], texts: list[str]) -> list[dict[str, Any]]:
    """Return TGI's list: each token with the characters of the text that it covers."""
    tokens = []
    position = 0
    for each, text in zip(ids, texts, strict=True):
        tokens.append({"id": each, "text": text, "start": position, "stop": position + len(text)})
        position += len(text)
    return tokens
