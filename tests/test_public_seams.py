"""Tests, benchmarks and guests use only public names of stemma, and no test module is imported by another.

Ruff (SLF) sees accesses to private names; this, what ruff can't.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCHING = {"setattr", "getattr", "hasattr", "delattr", "object", "patch", "attrgetter"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(source: str) -> Iterator[str]:
    """Yield private names that are imported from stemma, or named as strings to what patches and reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stemma"):
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            strings = [one.value for one in node.args if isinstance(one, ast.Constant)]
            names = [one for one in strings if isinstance(one, str)] if called in PATCHING else []
        else:
            continue
        yield from filter(is_private, names)


def imported_tests(source: str) -> Iterator[str]:
    """Yield test modules that are imported, or named in a string that another process runs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module]
            if node.level or module.split(".")[0] == "tests":
                names += [f"{module}.{one.name}" for one in node.names if one.name.startswith("test_")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"\btests(?:\.\w+)+", node.value)
        else:
            continue
        yield from (name for name in names if any(part.startswith("test_") for part in name.split(".")))


def test_helpers_stand_in_modules_of_their_own() -> None:
    """A test module's names are its own: what two need stands in a module that says what it is."""
    found = {
        str(path.relative_to(ROOT)): names
        for folder in ("tests", "packages")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != Path(__file__).name and (names := list(imported_tests(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from tests.engine.test_llm import ask", "tests.engine.test_llm"),
        ("import tests.engine.test_llm as llm", "tests.engine.test_llm"),
        ("from tests.engine import test_llm", "tests.engine.test_llm"),
        ("from .test_llm import ask", "test_llm"),
        ("run('-c', 'from tests.engine.test_llm import *')", "tests.engine.test_llm"),
    ],
)
def test_imports_of_tests_that_it_finds(source: str, module: str) -> None:
    assert list(imported_tests(source)) == [module]


def test_no_private_name_is_imported_or_patched() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for folder in ("tests", "benchmarks", "packages")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := list(private_names(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from stemma.engine.llm import _merge",
        "from stemma._hidden import a",
        "monkeypatch.setattr('stemma.engine.llm._merge', None)",
        "monkeypatch.setattr(llm, '_merge', None)",
        "mock.patch.object(LLM, '_run')",
        "getattr(llm, '_thread')",
    ],
)
def test_what_it_finds(source: str) -> None:
    assert list(private_names(source))


def test_the_cores_tests_need_no_guest() -> None:
    """Who installs the core alone can test it."""
    guests = re.compile(r"\b(stemma_[a-z]+|packages\.[a-z]+)\b")
    found = {
        str(path.relative_to(ROOT)): sorted(named)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (named := {name for name in _imports(path.read_text()) if guests.match(name)})
    }
    assert found == {}


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
