"""A checkpoint's chat template in bounds: it may loop and compute, but not for ever, nor fill the memory.

Jinja's sandbox keeps a template from the interpreter, not from ``10 ** 10 ** 8``, which holds Python's lock
and so stops every thread of the server, nor from ``'a' * 10 ** 10`` or loops within loops. Here what makes
something larger than its parts is checked. Powers, products, padding, formats and replacements are checked
before, for one of them can take all memory; sums, slices and lists after, for they are at most some times as
long as their parts, which were checked. Rounds of loops and calls are counted against a limit and a clock;
what takes longer without a round, in a filter's own loops, another thread interrupts (interrupts.py). Filters
whose work grows faster than what they are given are ours.

transformers makes the environment; `use_bounds` gives it this class in place of Jinja's.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, TypeVar

from jinja2 import nodes, pass_context, pass_environment
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from stemma.model.text.interrupts import interrupted_after

RENDER_LIMIT_S = 20.0
"""For one rendering, which takes some milliseconds."""
MAX_ROUNDS = 1 << 20
"""Rounds of loops, and calls, in one rendering."""
MAX_CHARS = 1 << 25
"""Characters of one text, or of all in a list."""
MAX_MADE_CHARS = 1 << 29
"""Characters of all texts that one rendering makes."""
_MAX_ITEMS = 1 << 20
"""Items of a list and of the lists in it."""
_MAX_BITS = 1 << 16
_Node = TypeVar("_Node", bound=nodes.Node)
_COUNTED, _ROUND, _MARK = "stemma_counted", "stemma_round", "is_bounded"
_GROWING = frozenset(
    {
        *("batch", "center", "format", "indent", "join", "round", "slice", "tojson", "wordwrap"),
        *(
            "expandtabs",
            "generate_lorem_ipsum",
            "ljust",
            "rjust",
            "to_bytes",
            "translate",
            "xmlattr",
            "zfill",
        ),
    }
)
"""Filters and methods whose result may be as long as the product of what they are given."""
_WIDE = re.compile(r"[0-9]{5}|\*")
_WIDE_IN_BRACES = re.compile(r"\{[^{}]*[0-9]{5}|\{[^{}]+\{")
"""Finds a width of more than four digits in a format, or one that is an argument."""


class TemplateTooSlow(TemplateRuntimeError):
    """A rendering reached its time limit."""

    def __init__(self) -> None:
        super().__init__(f"it takes more than {RENDER_LIMIT_S:g} s")


class _Rendering(threading.local):
    deadline = float("inf")  # until the first rendering begins
    num_rounds = 0
    made_chars = 0


_now = _Rendering()


@contextmanager
def rendering() -> Iterator[None]:
    """Count what templates do in this thread from here on against the limits of one rendering."""
    _now.deadline = time.monotonic() + RENDER_LIMIT_S
    _now.num_rounds = _now.made_chars = 0
    try:
        with interrupted_after(RENDER_LIMIT_S, TemplateTooSlow):
            yield
    finally:
        _now.deadline, _now.num_rounds, _now.made_chars = float("inf"), 0, 0


def use_bounds() -> None:
    """Let transformers render all templates of this process in these bounds."""
    vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = BoundedEnvironment


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises TemplateRuntimeError where a template leaves its bounds."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"+", "*", "**", "%"})  # type: ignore[misc]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters |= {_COUNTED: _counted, _ROUND: _count_round, "sum": _sum}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # Not when it is made: transformers adds filters afterwards. On constants they run in compiling.
        for filter_name, function in self.filters.items():
            if not hasattr(function, _MARK):
                self.filters[filter_name] = _bounded(filter_name, function)
        tree: nodes.Template = _Counting(self).visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` unless it is too large."""
        if operator == "+":
            return _counted(left + right)
        if operator == "%" and isinstance(left, str | bytes):
            _check_format(left, _WIDE)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right), _MAX_BITS, "a power")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() + right.bit_length(), _MAX_BITS, "a product")
        elif operator == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            _check_product(repeated, (times,))
        return _counted(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, macro or function of a template."""
        _count_round(context)
        name = getattr(obj, "__name__", None)
        if name in _GROWING or name == "replace":
            method = getattr(obj, "__wrapped__", obj)  # of `format` the sandbox makes its own
            _check_call(name, getattr(method, "__self__", ""), (*args, *kwargs.values()))
        made = super().call(context, obj, *args, **kwargs)
        return made if made is True or made is False else _counted(made)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandbox's own version of `str.format`, unless the format is too wide."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__, _WIDE_IN_BRACES)
        return wrapped

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a template, a macro or a block writes."""
        found, num_chars = [], 0
        for part in parts:
            num_chars += len(part)
            _check(num_chars, MAX_CHARS, "a text")
            found.append(part)
        _add_made(num_chars)
        return "".join(found)


class _Counting(NodeTransformer):
    """Has the rounds of loops counted, and what is made without a call."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is None:
            node.body.insert(0, self._placed(nodes.ExprStmt(self._round()), node))
        else:  # rounds that it leaves out count too; what counts them returns nothing
            node.test = self._placed(nodes.And(self._placed(nodes.Not(self._round()), node), node.test), node)
        return node

    def visit_Concat(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node, _COUNTED)

    visit_List = visit_Dict = visit_Concat

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_Concat(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self.visit_Concat(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def _round(self) -> nodes.Filter:
        return self._filtered(nodes.Const(None), _ROUND)

    def _placed(self, node: _Node, at: nodes.Node) -> _Node:
        node.set_environment(self._environment).set_lineno(at.lineno or 1, override=True)
        return node

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Filter:
        return self._placed(nodes.Filter(node, name, [], [], None, None), node)


@pass_context
def _count_round(_context: Any, _value: Any = None) -> None:
    rounds = _now.num_rounds = _now.num_rounds + 1
    if rounds > MAX_ROUNDS:
        _check(rounds, MAX_ROUNDS, "the number of rounds and calls")
    if time.monotonic() > _now.deadline:
        raise TemplateTooSlow


@pass_environment
def _sum(
    environment: BoundedEnvironment,
    iterable: Iterable[Any],
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    """Do what Jinja's filter does; lists are joined at once, not each to a copy of those before it."""
    items = list(iterable)
    if attribute is not None:
        items = [make_attrgetter(environment, attribute)(item) for item in items]
    if not isinstance(start, list | tuple):
        return sum(items, start)
    if not all(isinstance(item, type(start)) for item in items):
        raise TemplateRuntimeError("sum has a list to begin with and adds what is none")
    return type(start)(chain(start, *items))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks what it is given and what it makes; Jinja's marks on it stay."""
    if name in (_COUNTED, _ROUND):
        return function
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = (*args[num_passed:], *kwargs.values())
        if name == "format" and given:
            _check_format(given[0], _WIDE)
        _check_call(name, given[0] if given else "", given[1:])
        return _counted(function(*args, **kwargs))

    setattr(bounded, _MARK, True)
    return bounded


def _check_call(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Raise TemplateRuntimeError if a filter or method would make too much of `owner`."""
    if name == "replace" and isinstance(owner, str | bytes) and len(args) > 1:
        old, new = (arg if isinstance(arg, type(owner)) else str(arg) for arg in args[:2])
        if isinstance(old, type(owner)):
            _check(len(owner) + owner.count(old) * len(new), MAX_CHARS, "a text")  # type: ignore[arg-type]
    elif name == "format":
        _check_product(owner, [_size(arg) for arg in args])
    elif name in _GROWING:
        _check_product(owner, args)


def _check_product(value: Any, args: Iterable[Any]) -> None:
    """Raise TemplateRuntimeError if `value` as often as the largest of `args` says, or has parts, is too
    much."""
    factor = max((max(0, int(arg)) if isinstance(arg, int) else _size(arg) for arg in args), default=0)
    _check((1 + _size(value)) * (1 + factor), MAX_CHARS, "a text or a list")


def _check_format(text: Any, wide: re.Pattern[str]) -> None:
    if wide.search(text.decode("latin-1") if isinstance(text, bytes) else str(text)):
        raise TemplateRuntimeError(
            "a format has a width of more than four digits, or one that is an argument"
        )


def _check(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise TemplateRuntimeError(f"{what} becomes too large; the limit is {limit}")


def _counted(value: Any) -> Any:
    """Return `value`, which a template made, unless that is too much."""
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, bytes | list | tuple | dict):
        size = _size(value)
    else:
        return value
    if size > MAX_CHARS:
        _check(size, MAX_CHARS, "a text or a list")
    _add_made(size)
    return value


def _add_made(num_chars: int) -> None:
    made = _now.made_chars + num_chars
    if made > MAX_MADE_CHARS:
        _check(made, MAX_MADE_CHARS, "all that is made")
    _now.made_chars = made


def _size(value: Any) -> int:
    """Return the characters and items of a value, those of lists in lists included, at most some more than
    allowed."""
    if isinstance(value, str | bytes):
        return len(value)
    total, num_items, pending = 0, 0, [value]
    while pending:
        one = pending.pop()
        num_items += 1
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, dict):
            pending.extend(one)
            pending.extend(one.values())
        elif isinstance(one, list | tuple):
            pending.extend(one)
        if num_items + len(pending) > _MAX_ITEMS:
            return MAX_CHARS + 1
    return total + num_items
