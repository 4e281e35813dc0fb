"""How an answer was drawn, as values of JSON and back: all fields that it depends on, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from stemma.engine.sampling.calls import CallRule, CallRules
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingMarks, ThinkingTokens
from stemma.errors import InvalidRequest
from stemma_receipts.errors import ReceiptError

NUMBERS = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "seed", "max_tokens", "min_tokens", "ignore_eos", "skip_special_tokens"),
    *("include_stop_str_in_output", "max_thinking_tokens"),
)
"""Fields that say nothing of anybody's text."""
_LISTS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
NOT_IN_IT = frozenset({"logprobs", "prompt_logprobs"})
"""Fields that change what is told of an answer, and not the answer."""


def numbers(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are no text."""
    return {name: getattr(params, name) for name in NUMBERS}


def rules(params: SamplingParams) -> dict[str, Any]:
    """Return the others, those that are set: lists, grammars, calls, marks of thinking."""
    found: dict[str, Any] = {name: _plain(getattr(params, name)) for name in _LISTS if getattr(params, name)}
    if params.grammar is not None:
        found["grammar"] = _grammar(params.grammar)
    if params.calls is not None:
        found["calls"] = {
            "rules": [{"head": one.head.hex(), "rest": _grammar(one.rest)} for one in params.calls.rules],
            "thinking": _marks(params.calls.thinking),
        }
    if params.limits_thinking and params.thinking is not None:
        found["thinking"] = {
            "marks": _marks(params.thinking.marks),
            "forced": _plain(params.thinking.forced),
            "forced_again": _plain(params.thinking.forced_again),
        }
    return found


def params_of(
    plain: Mapping[str, Any], given: Mapping[str, Any], spelled: Mapping[int, bytes]
) -> SamplingParams:
    """Return the parameters that `numbers` and `rules` told; `spelled`: the bytes of each token.

    Raises ReceiptError.
    """
    if set(plain) != set(NUMBERS) or not set(given) <= {*_LISTS, "grammar", "calls", "thinking"}:
        raise ReceiptError("the receipt's sampling has other fields than this version knows")
    try:
        lists = {name: _tuples(given[name]) for name in _LISTS if name in given}
        found: dict[str, Any] = {**plain, **lists}
        if "grammar" in given:
            found["grammar"] = GrammarSpec(**given["grammar"])
        if "calls" in given:
            found["calls"] = _calls_of(given["calls"], spelled)
        if "thinking" in given:
            told = given["thinking"]
            marks = _marks_of(told["marks"])
            assert marks is not None
            again = _tuples(told["forced_again"])
            found["thinking"] = ThinkingTokens(marks, _tuples(told["forced"]), spelled, again)
        return SamplingParams(**found)
    except (InvalidRequest, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ReceiptError(f"the receipt's sampling can't be read: {error}") from error


def _calls_of(given: Mapping[str, Any], spelled: Mapping[int, bytes]) -> CallRules:
    rules = [CallRule(bytes.fromhex(one["head"]), GrammarSpec(**one["rest"])) for one in given["rules"]]
    return CallRules(tuple(rules), _marks_of(given["thinking"]), spelled)


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _grammar(spec: GrammarSpec) -> dict[str, Any]:
    return asdict(spec)


def _marks(marks: ThinkingMarks | None) -> dict[str, Any] | None:
    if marks is None:
        return None
    values = {one.name: getattr(marks, one.name) for one in fields(marks)}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}


def _marks_of(given: Mapping[str, Any] | None) -> ThinkingMarks | None:
    if given is None:
        return None
    values: dict[str, Any] = {
        name: bytes.fromhex(one) if isinstance(one, str) else one for name, one in given.items()
    }
    return ThinkingMarks(**values)
