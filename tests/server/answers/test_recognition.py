"""The format is chosen by what a chat template writes of a marked call and marked thinking."""

from __future__ import annotations

import pytest
from tests.server.answers.written_calls import EXPECTED, TEMPLATES, Written, template

from stemma.errors import ConfigError
from stemma.server.answers.families import AnswerFormat, answer_format, said
from stemma.server.answers.formats.registry import TOOL_FORMATS
from stemma.server.answers.formats.thinking import THINK, THINKING_FORMATS


def names(form: AnswerFormat) -> tuple[str | None, str | None]:
    return (
        None if form.tools is None else form.tools.name,
        None if form.thinking is None else form.thinking.name,
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_chooses_what_reads_its_calls_and_its_thinking(name: str):
    assert names(answer_format("auto", "auto", template(name))) == EXPECTED[name]


def test_each_template_here_is_expected_and_each_format_has_one():
    assert {path.stem for path in TEMPLATES.iterdir()} == set(EXPECTED)
    assert {tools for tools, _ in EXPECTED.values()} >= set(TOOL_FORMATS) - {"deepseek_v4"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ fail() }} <tool_call><function=f><parameter=p>", "qwen3_coder"),
        ("{{ fail() }} <tool_call>f<arg_key>", "glm"),
        ('{{ fail() }} <tool_call>{"name"', "hermes"),
        ("{{ fail() }} [TOOL_CALLS]", "mistral"),
        ("{{ fail() }} <｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("{{ fail() }} <|python_tag|>", "llama3_json"),
        ("{{ messages }} {# says nothing of calls #}", None),
        (None, None),
    ],
)
def test_a_template_that_fails_is_searched_for_words(source: str | None, expected: str | None):
    assert names(answer_format("auto", "off", Written(source))) == (expected, None)


def test_a_word_that_a_template_only_talks_of_chooses_nothing():
    """A prompt may speak of ``<tool_call>`` though calls are written otherwise."""
    source = "{# <tool_call> #}" + (TEMPLATES / "kimi_k2.jinja").read_text()
    assert names(answer_format("auto", "auto", Written(source)))[0] == "kimi_k2"


def test_the_end_of_thinking_is_what_the_template_writes():
    for name, behind in (("chatml_hermes", "\n\n"), ("glm", "\n"), ("kimi_k2", "")):
        thinking = answer_format("auto", "auto", template(name)).thinking
        assert thinking is not None
        assert thinking.behind == behind


def test_settings_override_the_template():
    hermes = template("chatml_hermes")
    assert names(answer_format("mistral", "on", hermes)) == ("mistral", "think")
    assert answer_format("off", "off", hermes) == AnswerFormat(None, None)
    assert answer_format("auto", "on", template("no_calls")).thinking is THINK
    assert names(answer_format("auto", "seed", hermes)) == ("hermes", "seed")
    assert names(answer_format("harmony", "auto", Written(None))) == ("harmony", "harmony")
    assert names(answer_format("deepseek", "auto", Written(None)))[0] == "deepseek_v31"


def test_a_name_that_doesnt_exist_is_refused_with_all_that_do():
    with pytest.raises(ConfigError) as refused:
        answer_format("hermse", "auto", Written(None))
    assert all(name in str(refused.value) for name in ("auto", "off", *TOOL_FORMATS))
    with pytest.raises(ConfigError) as refused:
        answer_format("auto", "maybe", Written(None))
    assert all(name in str(refused.value) for name in ("auto", "on", "off", *THINKING_FORMATS))


def test_one_line_says_what_is_read_or_warns():
    assert said(answer_format("auto", "auto", template("glm")), template("glm")) == (
        "tool calls: glm; thinking: think",
        False,
    )
    unknown = Written("{{ tools }}{{ messages }}")
    line, is_warning = said(answer_format("auto", "auto", unknown), unknown)
    assert is_warning
    assert "--tool-parser" in line
