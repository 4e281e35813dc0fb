"""A checkpoint's template that computes without end is refused; others render as by transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.model.hostile import little_memory
from transformers.utils import chat_template_utils

from stemma.errors import InvalidRequest
from stemma.model.files.tiny import CHAT_TEMPLATE, build_tokenizer
from stemma.model.text import template_bounds
from stemma.model.text.template_bounds import BoundedEnvironment
from stemma.model.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
GROW = "{% set ns = namespace(x='aaaaaaaa', y=['a']) %}{% for i in range(99) %}"
LOOP = "{% for a in range(99999) %}"
HOSTILE = {
    "power": "{{ (10 ** (10 ** 8)) % 7 }}",
    "power alone": "{{ 10 ** (10 ** 8) }}",
    "constants": "{{ 'a' | center(10000000000) | length }}",
    "negative power": "{{ 10 ** -(10 ** 30) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "text times": "{{ 'a' * (10 ** 10) }}",
    "times list": "{{ (10 ** 10) * [1] }}",
    "loops": LOOP + "{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops of nothing": LOOP + "{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'abcdefgh' * 9999 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1] * 9) }}{% endfor %}",
    "concat": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "sum": GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "sum of lists": GROW + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
    "list of lists": GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
    "objects": GROW + "{% set ns.y = {'a': ns.y, 'b': ns.y} %}{% endfor %}{{ ns.y | tojson }}",
    "dict": GROW + "{% set ns.y = dict(a=ns.y, b=ns.y) %}{% endfor %}{{ ns.y | tojson }}",
    "tuples": GROW + "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.y }}",
    "block": GROW + "{% set z %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = z %}{% endfor %}",
    "tojson": GROW + "{% set ns.x = ns.x | tojson | tojson %}{% endfor %}",
    "copies": "{% set x = 'a' * 9999999 %}{% set ns = namespace(y=[]) %}{% for i in range(999) %}"
    "{% set ns.y = ns.y + [x[1:]] %}{% endfor %}",
    "replace": GROW + "{% set ns.x = ns.x.replace('a', 'aaaaaaaa') %}{% endfor %}",
    "replace filter": GROW + "{% set ns.x = ns.x | replace('a', 'aaaaaaaa') %}{% endfor %}",
    "join": "{% set x = ('a' * 99999) %}{{ x.join('b' * 99999) }}",
    "join filter": "{% set x = ('a' * 99999) %}{{ ('b' * 99999) | join(x) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 10) }}",
    "indented json": "{{ [1] | tojson(indent=10 ** 10) }}",
    "batch": "{{ 'ab' | batch(10 ** 10, 'x') | list }}",
    "percent": "{{ '%09999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "braces": "{{ '{:9999999999}'.format(1) }}",
    "nested braces": "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
    "format map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "many braces": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "lipsum": "{{ lipsum(n=10 ** 8) }}",
}
PLAIN = (
    CHAT_TEMPLATE,
    "{% set ns = namespace(n=0, said='') %}{% for m in messages[::-1] %}"
    "{% set ns.n = ns.n + loop.index0 * 2 %}"
    "{% if m.role == 'tool' %}{% continue %}{% endif %}{% set ns.said = ns.said ~ m['content'] ~ 1 %}"
    "{% endfor %}{{ ns.n % 3 }}{{ ns.said[1:-1] }}{{ 2 ** 10 }}{{ '-' * 20 }}{{ [1] * 2 + [3] }}",
    "{% macro show(m, depth=0) %}{{ '  ' * depth }}{{ m.role.upper() }}{% for k, v in m.items() %}{{ k }}="
    "{{ v | tojson(indent=2) }}{{ '\\n' if not loop.last }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m, loop.index) | indent(4) }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role != 'system' recursive %}{{ loop.index }}/{{ loop.length }} {{ m.content "
    "if m is mapping else m }}{{ loop(['x', 'y']) if m is mapping and loop.first }}{% endfor %}",
    "{% for a, b in [('x', 1), ('y', 2)] %}{% set c, d = b, a %}{{ c }}{{ d }}"
    "{{ {'k': [a, (b,)]} }}{% endfor %}"
    "{{ '%s has %05d' % ('a', 7) }}{{ '%d' | format(1700000000) }}"
    "{{ 'id: {} {x:>5}'.format(123456, x='b') }}",
    "{{ messages | map(attribute='content') | join(', ') | replace('l', 'LL') | center(40) | trim }}"
    "{{ messages[0].content.split('l') | last }}{{ messages[0].content.replace('H', 'J').ljust(9) }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ tools | tojson }}{{ bos_token }}",
    "{% set said %}{% for m in messages %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    "{% endset %}{{ said | upper }}{% call(x) joined() %}{{ x }}{% endcall %}"
    "{% macro joined() %}{{ caller('inside') }}{% endmacro %}",
    "{{ raise_exception('only ' ~ messages | length) }}",
    "{{ [1, 2.5] | sum }}{{ messages | sum(attribute='n', start=3) }}{{ [[1], [2, 3]] | sum(start=[0]) }}"
    "{{ [(1,), (2,)] | sum(start=()) }}{{ [] | sum }}",
)
MESSAGES = [{"role": "system", "content": "Be kind"}, *HELLO, {"role": "assistant", "content": "Hé\n{x}"}]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    return path


def refusal(path: Path, template: str) -> str:
    (path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(path)
    with little_memory():
        assert tokenizer.template_variables == frozenset()  # to find them computes what is constant
        with pytest.raises(InvalidRequest) as refused:
            tokenizer.apply_chat_template(HELLO)
    return str(refused.value)


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_without_end_is_refused(
    template: str, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "MAX_ROUNDS", 20_000)
    message = refusal(tokenizer_path, template)
    assert "the chat template refuses these messages" in message
    assert any(word in message for word in ("too large", "more than four digits", "RecursionError"))


def test_a_template_that_takes_too_long(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "RENDER_LIMIT_S", 0.0)
    assert "it takes more than 0 s" in refusal(tokenizer_path, "{% for a in [1] %}{% endfor %}")


def test_a_filter_that_takes_too_long_is_interrupted(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop of the template's own goes on meanwhile."""
    monkeypatch.setattr(template_bounds, "RENDER_LIMIT_S", 0.3)
    text = refusal(tokenizer_path, "{% set n = messages | length %}{{ ('www.a.b ' * 2000000 * n) | urlize }}")
    assert "it takes more than 0.3 s" in text


def test_lists_are_joined_by_sum_in_one_go(tokenizer_path: Path) -> None:
    """Jinja adds them one by one, each to a copy of those before: 40,000 took 19 s, in a single call."""
    template = (
        "{% set n = messages | length %}{{ range(40000 * n) | batch(1) | list | sum(start=[]) | length }}"
    )
    (tokenizer_path / "chat_template.jinja").write_text(template)
    assert Tokenizer(tokenizer_path).render_chat(HELLO) == "40000"


def test_each_rendering_has_its_own_count(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_ROUNDS", 10)
    (tokenizer_path / "chat_template.jinja").write_text("{% for a in range(8) %}{{ a }}{% endfor %}")
    tokenizer = Tokenizer(tokenizer_path)
    for _ in range(3):
        assert tokenizer.decode(tokenizer.apply_chat_template(HELLO).tolist()) == "01234567"


@pytest.mark.parametrize("template", PLAIN)
def test_others_render_as_by_transformers_alone(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rendered(text: str) -> Any:
        try:
            return chat_template_utils.render_jinja_template(
                [MESSAGES], tools=[{"type": "function"}], chat_template=text, bos_token="<s>"
            )
        except TemplateError as error:
            return repr(error)

    name = "ImmutableSandboxedEnvironment"
    assert vars(chat_template_utils)[name] is BoundedEnvironment
    bounded = rendered(template)
    monkeypatch.setattr(chat_template_utils, name, ImmutableSandboxedEnvironment)
    assert bounded == rendered(template + "{# compiled anew #}")
