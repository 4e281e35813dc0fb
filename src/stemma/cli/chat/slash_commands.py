"""Commands of a chat: their names, what they do, and how a line is told from a question."""

from __future__ import annotations

import re

COMMANDS = {
    "help": "this list",
    "reset": "begin a new conversation",
    "tree": "draw the server's cache",
    "exit": "leave; Ctrl-D and Ctrl-C at an empty line too",
}
_OTHER_NAMES = {"quit": "exit", "bye": "exit", "clear": "reset", "?": "help"}
_COMMAND = re.compile(r"/([a-z?]+)\s*\Z")


def command_of(line: str) -> str | None:
    """Return the command that a line is, None if it is a question.

    A command is one word behind a slash, known or not: ``/ect/hosts`` and ``/me waves`` are questions.
    """
    found = _COMMAND.match(line.strip())
    return None if found is None else _OTHER_NAMES.get(found[1], found[1])
