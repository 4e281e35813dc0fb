"""A grammar of text is followed within a JSON string as outside of one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from stemma.server.answers.formats.escaped import escaped_lark, escaped_regex, lark_of_regex

TOKENIZER = LLTokenizer("byte")
PATCH = r"""
// changes of a file
start: "*** Begin" LF change+ "*** End" LF?
change: "@@" /[^\n"]*/ LF line+
line: ("+" | "-" | " ") REST LF
REST: /(.*)/
%import common.LF
"""
REGEXES = (
    r"[a-z]+",
    r"a\nb",
    r'say "\w+"',
    r"[^x]{2,5}",
    r"[\n\t ]+",
    r"\S+\s\S+",
    r"(?s:.+)!",
    r".*",
    r"(.+)",
    r"x[^\n]*",
    r"(?s:.*)",
    r"a|.*",
    r"\\d(a|b)?",
    r"[\"\\]+",
    r"\x41\u0042\/",
    r"(a(?s:.)b)+(?i:X|\n)?.?",
    r"a/b",
)


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pattern", REGEXES)
@given(
    text=st.one_of(
        st.text(alphabet='ab "\\\n\tx!d/AB\x01é', max_size=6),
        st.sampled_from(("a\nb", 'say "x"', "\\d", "\\da", "AB/", "a/b", "ab cd")),
    )
)
def test_a_regular_expression_means_the_same(pattern: str, text: str):
    escaped = f"start: {escaped_regex(lark_of_regex(pattern)[8:-2])}\n"
    assert accepts(escaped, json.dumps(text, ensure_ascii=False)[1:-1]) == accepts(
        lark_of_regex(pattern), text
    )


@pytest.mark.parametrize(
    "text",
    [
        '*** Begin\n@@ def f():\n-    return "a\\n"\n+\treturn 1\n*** End',
        "*** Begin\n@@\n \n*** End\n",
        "*** Begin\n*** End",
        '*** Begin\n@@ "\n+x\n*** End',
        "*** Begin\\n@@\n+x\n*** End",
    ],
)
def test_a_grammar_means_the_same(text: str):
    assert accepts(escaped_lark(PATCH), json.dumps(text)[1:-1]) == accepts(PATCH, text)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /(?=a)b/",
        r"start: /\bword/",
        r"start: /\p{Lu}/",
        "start: /(?s)./",
        "start: /[^[:alpha:]]/",
        'start: %json {"type": "object"}',
        "start: @other",
    ],
)
def test_what_cant_be_said_in_a_string_is_refused(grammar: str):
    with pytest.raises(ValueError, match="JSON string"):
        escaped_lark(grammar)
