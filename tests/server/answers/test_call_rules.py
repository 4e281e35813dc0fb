"""A tool's grammar holds where the model chooses to call it, in each family's form, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
from tests.server.answers.reading import read, reader
from tests.server.answers.written_calls import EXPECTED, WRITERS, written
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stemma.engine.sampling.calls import CallLimit, CallRules
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.params import SamplingParams
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.chat import tool_use
from stemma.server.answers.formats.forced import TextGrammar
from stemma.server.answers.formats.registry import TOOL_FORMATS

LARK = r"""
start: "*** Begin" LF line+ "*** End"
line: ("+" | "-") /(.*)/ LF
%import common.LF
"""
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
COUNT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: Mapping[str, Any] = {"apply": INPUT, "other": INPUT, "count": COUNT}
RIGHT = '*** Begin\n+print("a\\n")\n-\tb é\n*** End'
WRONG = '*** Begin\n+print("a")\nanything\n*** End'
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>")


@pytest.fixture(scope="module", params=["characters", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Characters; or also pieces across places where a rule begins, and markers that are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    if request.param == "pieces":
        hf.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        hf.add_tokens(['": {"', '":', 'ply">\n', '">\n<', '", "', "\n"])
    path = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(path)
    return Tokenizer(path)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def rules_of(
    tokenizer: Tokenizer, form: str, thinking: str | None = None, **options: Any
) -> CallRules | None:
    functions = [
        {"name": name, "parameters": schema, "strict": name == "count"} for name, schema in SCHEMAS.items()
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    use = tool_use(tools, "auto", parallel=True, texts={"apply": TextGrammar("lark", LARK)})
    made = reader(form, thinking, schemas=SCHEMAS, **options)
    made = type(made)(made.format, use, made.opened)
    return made.constrain(SamplingParams(), tokenizer).calls


def limit_of(tokenizer: Tokenizer, rules: CallRules) -> CallLimit:
    compiler = GrammarCompiler(
        tokenizer.transformers_tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids
    )
    return CallLimit(rules, [compiler.compile(rule.rest) for rule in rules.rules])


def num_allowed(
    tokenizer: Tokenizer, form: str, text: str, *options: Any, **more: Any
) -> tuple[int, int, bool]:
    """Return how much of `text` a model may write, of how many tokens, and whether anything may follow."""
    rules = rules_of(tokenizer, form, *options, **more)
    assert rules is not None
    limit, ids = limit_of(tokenizer, rules), ids_of(tokenizer, text)
    number = limit.num_valid(ids)
    for token in ids[:number]:
        limit.append(token)
    return number, len(ids), limit.allowed() is None


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_follows_its_grammar_in_each_familys_form(tokenizer: Tokenizer, name: str):
    tools = EXPECTED[name][0] or ""
    for before in ("", "Now I apply it.\n"):
        number, length, is_free = num_allowed(
            tokenizer, tools, before + written(name, [("apply", {"input": RIGHT})])
        )
        assert (number, is_free) == (length, True)
        number, length, is_free = num_allowed(
            tokenizer, tools, before + written(name, [("apply", {"input": WRONG})])
        )
        assert number < length
        assert not is_free


@pytest.mark.parametrize("name", WRITERS)
def test_what_has_no_grammar_is_free(tokenizer: Tokenizer, name: str):
    tools = EXPECTED[name][0] or ""
    for text in (written(name, [("other", {"input": WRONG})]), f"apply {WRONG} <tool_call> appl(", WRONG):
        number, length, is_free = num_allowed(tokenizer, tools, text)
        assert (number, is_free) == (length, True)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("llama3_json", "harmony")])
def test_each_of_several_calls_is_bound(tokenizer: Tokenizer, name: str):
    tools = EXPECTED[name][0] or ""
    calls = [("other", {"input": WRONG}), ("apply", {"input": RIGHT}), ("apply", {"input": WRONG})]
    number, length, is_free = num_allowed(tokenizer, tools, written(name, calls[:2]))
    assert (number, is_free) == (length, True)
    number, length, _ = num_allowed(tokenizer, tools, written(name, calls))
    assert number < length


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_of_a_strict_tool_follow_its_schema(tokenizer: Tokenizer, name: str):
    tools = EXPECTED[name][0] or ""
    number, length, is_free = num_allowed(
        tokenizer, tools, written(name, [("count", {"city": "A", "days": 3})])
    )
    assert (number, is_free) == (length, True)
    number, length, _ = num_allowed(tokenizer, tools, written(name, [("count", {"city": "A", "days": "no"})]))
    assert number < length


def test_a_call_in_the_thinking_is_free(tokenizer: Tokenizer):
    call = written("chatml_hermes", [("apply", {"input": WRONG})])
    for text, opened in ((f"<think>{call}</think>", False), (f"{call}</think>", True)):
        number, length, is_free = num_allowed(tokenizer, "hermes", text, "think", opened=opened)
        assert (number, is_free) == (length, True)
        number, length, _ = num_allowed(tokenizer, "hermes", text + call, "think", opened=opened)
        assert number < length


@pytest.mark.parametrize("gap", ["", " ", "\n  "])
def test_white_space_is_the_models_own(tokenizer: Tokenizer, gap: str):
    parts = (
        "<tool_call>",
        "{",
        '"name":',
        '"apply",',
        '"arguments":',
        '{"input":',
        r'"*** Begin\n+a\n*** End"}}',
    )
    call = gap.join(parts) + "</tool_call>"
    number, length, is_free = num_allowed(tokenizer, "hermes", call)
    assert (number, is_free) == (length, True)
    assert [one.name for one in read(call, "hermes").calls] == ["apply"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WRITERS)
def test_a_draft_is_judged_as_if_it_were_written(tokenizer: Tokenizer, name: str):
    rules = rules_of(tokenizer, EXPECTED[name][0] or "")
    assert rules is not None
    ids = ids_of(tokenizer, written(name, [("apply", {"input": RIGHT})]) + "\nDone.")
    written_out, asked = limit_of(tokenizer, rules), limit_of(tokenizer, rules)
    for number, token in enumerate(ids):
        one, other = asked.allowed(ids[:number]), written_out.allowed()
        assert (one is None) == (other is None)
        assert one is None or other is None or (one == other).all()
        written_out.append(token)


def test_a_name_that_begins_another_is_left_free_where_nothing_ends_it(caplog: pytest.LogCaptureFixture):
    use = tool_use(
        [{"type": "function", "function": {"name": name}} for name in ("apply", "apply_all")],
        "auto",
        parallel=True,
        texts={"apply": TextGrammar("lark", LARK)},
    )
    made = reader("glm")
    made = type(made)(made.format, use, opened=False)
    with caplog.at_level("INFO"):
        known = Mock(spec=Tokenizer, special_token_texts=frozenset())
        assert made.constrain(SamplingParams(), known).calls is None
    assert "'apply' stay free (glm)" in caplog.text


def test_every_format_has_a_form():
    assert [name for name, form in TOOL_FORMATS.items() if form.form is None] == []
