"""The router's commands, and what they need."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import stemma_router
from stemma.cli import GUESTS, load_command
from stemma_router.commands import COMMANDS

SOURCES = Path(stemma_router.__file__).parent


def test_the_core_says_which_commands_come_with_the_router() -> None:
    assert GUESTS["stemma-router"] == tuple(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_what_the_command_says(name: str) -> None:
    command = load_command(name)
    assert command.help is not None
    assert inspect.cleandoc(command.help).splitlines()[0] == COMMANDS[name][1]


def test_a_router_needs_no_torch() -> None:
    """It starts in half a second, and its machine need not have it."""
    code = "import sys, stemma_router.routing.fleet as _; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_no_module_makes_a_client_that_asks_the_environment_for_a_proxy() -> None:
    """Clients come from `stemma.http`."""
    found = [
        f"{path.relative_to(SOURCES)}: {node.func.attr}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "httpx"
        and node.func.attr in {"Client", "AsyncClient", "get", "post", "put", "delete", "request", "stream"}
    ]
    assert found == []
