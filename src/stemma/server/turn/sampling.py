"""From request fields to `SamplingParams`: the request's word, else the checkpoint's, else the API's."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.errors import InvalidRequest
from stemma.server.schemas.bounds import MAX_SEED, MAX_STOP_CHARS_TOTAL
from stemma.server.schemas.openai import ChatRequest, CompletionRequest, OpenAIRequest
from stemma.server.schemas.shared import SampledRequest
from stemma.server.schemas.tgi import TGIParameters, VLLMGenerateRequest
from stemma.server.turn.intake import Intake
from stemma.server.turn.structured import requested_grammar, structured_grammar, tgi_grammar
from stemma.server.turn.thinking import thinking_budget

_DEFAULTABLE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields that a checkpoint's generation_config may set."""
MAX_TOKEN_DIGITS = 9
_SHAPING = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.type in ("int", "float") and field.name in SampledRequest.model_fields
)
"""Numbers that a request may set and that `SamplingParams` has under the same name."""


def chat_sampling(intake: Intake, body: ChatRequest) -> SamplingParams:
    """Return the sampling of a chat request; without a limit, as many tokens as the context allows."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs can't be streamed", param="prompt_logprobs")
    _check_logprobs(intake, logprobs, "top_logprobs")
    params = _sampling(intake, body, requested_grammar(body), limit, logprobs, body.prompt_logprobs)
    knows = "reasoning_effort" in intake.engine.tokenizer.template_variables
    return replace(params, max_thinking_tokens=thinking_budget(body, template_knows_effort=knows))


def completion_sampling(intake: Intake, body: CompletionRequest) -> SamplingParams:
    """Return the sampling of a plain completion; without a limit, 16 tokens as OpenAI documents."""
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs can't be streamed", param="prompt_logprobs")
    _check_logprobs(intake, body.logprobs, "logprobs")
    limit = 16 if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    if limit == 0 and body.echo and prompt_logprobs is None:
        limit = 1  # nothing is generated, nor computed: the parameters are only checked
    return _sampling(intake, body, requested_grammar(body), limit, body.logprobs, prompt_logprobs)


def vllm_sampling(intake: Intake, body: VLLMGenerateRequest) -> SamplingParams:
    """Return the sampling of vLLM's shape; without a limit, as many tokens as the context allows."""
    return _sampling(intake, body, structured_grammar(body.structured_outputs), body.max_tokens)


def _sampling(
    intake: Intake,
    body: OpenAIRequest | VLLMGenerateRequest,
    grammar: GrammarSpec | None,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    _check_logprobs(intake, prompt_logprobs, "prompt_logprobs")
    if prompt_logprobs is not None and body.use_beam_search:
        raise InvalidRequest("beam search reports no prompt_logprobs", param="prompt_logprobs")
    if grammar is not None and body.use_beam_search:
        raise InvalidRequest("beam search can't follow a grammar", param=grammar.param)
    return SamplingParams(
        n=check_n(intake, body.n),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=body.include_stop_str_in_output,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        grammar=grammar,
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=_bad_words(intake, body.bad_words),
        **({} if body.use_beam_search else _chosen(body, intake.engine.default_sampling)),
    )


def _check_logprobs(intake: Intake, wanted: int | None, param: str) -> None:
    """Raise InvalidRequest for more log-probabilities of a token than the operator allows."""
    most = intake.settings.requests.max_logprobs
    if wanted is not None and wanted > most:
        message = f"{param} must be at most {most} on this server, got {wanted} (--max-logprobs)"
        raise InvalidRequest(message, param=param)


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs; JSON has only strings for keys."""
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is no token id", param="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _bad_words(intake: Intake, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word as it begins a text and as it follows a space."""
    found: list[tuple[int, ...]] = []
    for word in words or ():
        for text in (word, " " + word.lstrip()):
            ids = tuple(intake.engine.tokenizer.encode(text, add_special_tokens=False).tolist())
            if ids and ids not in found:
                found.append(ids)
    return tuple(found)


def check_n(intake: Intake, n: int | None) -> int:
    """Return the number of sequences; raise InvalidRequest if they could never run together."""
    wanted = 1 if n is None else n
    limit = intake.largest_n
    if not 1 <= wanted <= limit:
        raise InvalidRequest(f"n must be between 1 and {limit} on this server, got {wanted}", param="n")
    return wanted


def widen_to_best_of(
    intake: Intake, params: SamplingParams, best_of: int | None, *, stream: bool
) -> SamplingParams:
    """Return `params` for `best_of` sequences, of which `best_of.keep_best` keeps `params.n`."""
    if best_of is None or best_of == params.n:
        return params
    limit = intake.largest_n
    if not params.n < best_of <= limit:
        raise InvalidRequest(f"best_of must be between n and {limit}, got {best_of}", param="best_of")
    if stream:
        raise InvalidRequest("best_of can't be streamed: the best is known at the end", param="best_of")
    if params.greedy:
        raise InvalidRequest("best_of needs a temperature above 0", param="best_of")
    return replace(params, n=best_of, logprobs=params.logprobs or 0)


def _stops(stop: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if sum(map(len, stops)) > MAX_STOP_CHARS_TOTAL:
        raise InvalidRequest(f"{param} exceeds {MAX_STOP_CHARS_TOTAL} characters in total", param=param)
    return stops


def _chosen(body: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the request or, where it is silent, the checkpoint sets."""
    chosen = {name: defaults[name] for name in _DEFAULTABLE if defaults.get(name) is not None}
    for name in _SHAPING:
        value = getattr(body, name, None)
        if value is not None:
            chosen[name] = value
    return chosen


def tgi_sampling(intake: Intake, parameters: TGIParameters) -> SamplingParams:
    """Return the sampling of TGI's shape: greedy unless it asks to sample or sets a sampling field.

    A sampled request without a seed gets one, so that ``details.seed`` lets the caller repeat it.
    """
    for name, unsupported in (
        ("typical_p", parameters.typical_p is not None and parameters.typical_p < 1.0),
        ("watermark", parameters.watermark),
    ):
        if unsupported:
            raise InvalidRequest(f"{name} is not supported", param=f"parameters.{name}")
    stops = _stops(parameters.stop, "parameters.stop")
    given = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.seed)
    sample = parameters.do_sample
    if sample is None:
        sample = any(value is not None for value in given)
    chosen = _chosen(parameters, intake.engine.default_sampling)
    seed = parameters.seed
    if not sample:
        chosen["temperature"] = 0.0
    elif seed is None:
        seed = secrets.randbelow(MAX_SEED)
    return SamplingParams(
        seed=seed,
        stop=stops,
        max_tokens=parameters.max_new_tokens,
        grammar=tgi_grammar(parameters.grammar),
        logprobs=0 if parameters.details else None,
        # MindIE's prefill tokens have no log-probabilities: then nothing needs to be computed for them.
        prompt_logprobs=0
        if parameters.decoder_input_details and intake.settings.requests.dialect != "mindie"
        else None,
        **chosen,
    )


def candidates(
    intake: Intake,
    body: ChatRequest | CompletionRequest | VLLMGenerateRequest,
    params: SamplingParams,
) -> tuple[SamplingParams, BeamParams | None]:
    """Return what the engine is asked for: `best_of` sequences, of which `params.n` count, or a search."""
    beam = _search(body, params.n, body.best_of)
    if beam is not None:
        return params, beam
    return widen_to_best_of(intake, params, body.best_of, stream=bool(body.stream)), None


def _search(
    body: ChatRequest | CompletionRequest | VLLMGenerateRequest, n: int, best_of: int | None
) -> BeamParams | None:
    """Return the search that `body` asks for: `best_of` beams, or `n`; None if it asks for none.

    temperature, top_k, top_p, min_p and seed are ignored, as in vLLM. Raises InvalidRequest for stop
    strings, min_tokens and penalties, which would silently change nothing.
    """
    if not body.use_beam_search:
        return None
    for name, neutral in (
        ("stop", (None, [])),
        ("min_tokens", (None, 0)),
        ("repetition_penalty", (None, 1.0)),
        ("frequency_penalty", (None, 0.0)),
        ("presence_penalty", (None, 0.0)),
    ):
        if getattr(body, name, None) not in neutral:
            raise InvalidRequest(f"{name} can't be used with use_beam_search", param=name)
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of must be at least n = {n}, got {best_of}", param="best_of")
    return BeamParams(n if best_of is None else best_of, body.length_penalty)
