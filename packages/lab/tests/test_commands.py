"""The lab's commands as the core knows them."""

from __future__ import annotations

import inspect

import pytest

from stemma.cli import GUESTS, load_command
from stemma_lab.commands import COMMANDS


def test_the_core_says_which_commands_come_with_the_lab() -> None:
    assert GUESTS["stemma-lab"] == tuple(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_what_the_command_says(name: str) -> None:
    command = load_command(name)
    assert command.help is not None
    assert inspect.cleandoc(command.help).splitlines()[0] == COMMANDS[name][1]
