"""What the scripted model says: ten answers that read and edit a file with the tools that an agent offers.

A prompt tells all: the task names the dialect (whose tools) and the file, what was said so far the step. A
prompt without the task, or without the tools (agents ask for titles), gets a short text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUM_STEPS = 10
BEFORE = "alpha: 1\nbeta: 2\ngamma: 3\n"
AFTER = "alpha: 10\nbeta: 20\ngamma: 30\n"
_TASK = re.compile(r"Ledger task for (\w+): set every number in (\S+) to ten times itself\.")
_STEP = re.compile(r"Step (\d+) of 10")
_LINES = BEFORE.splitlines(), AFTER.splitlines()
_PATCH = "*** Begin Patch\n*** Update File: {file}\n@@\n-{old}\n+{new}\n*** End Patch\n"
_CHECK = "cat '{file}' | wc -l"


@dataclass(frozen=True)
class Call:
    """A tool's name and arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """How an agent takes what the plan needs."""

    read: Callable[[str], Call | str]
    """Of the file."""
    edit: Callable[[str, str, str], Call | str]
    """File, old text, new text."""
    run: Callable[[str], Call | str]
    """A line for a shell."""


def task(dialect: str, file: str) -> str:
    """Return what the user asks for."""
    return f"Ledger task for {dialect}: set every number in {file} to ten times itself."


DIALECTS = {
    "claude": Dialect(
        lambda file: Call("Read", {"file_path": file}),
        lambda file, old, new: Call("Edit", {"file_path": file, "old_string": old, "new_string": new}),
        lambda line: Call("Bash", {"command": line, "description": "Count the lines"}),
    ),
    "codex": Dialect(
        lambda file: Call("exec_command", {"cmd": f"cat '{file}'"}),
        lambda file, old, new: Call("exec_command", {"cmd": f"sed -i 's/^{old}$/{new}/' '{file}'"}),
        lambda line: Call("exec_command", {"cmd": line}),
    ),
    "codex_patch": Dialect(
        lambda file: Call("exec_command", {"cmd": f"cat '{file}'"}),
        lambda file, old, new: Call("apply_patch", {"input": _PATCH.format(file=file, old=old, new=new)}),
        lambda line: Call("exec_command", {"cmd": line}),
    ),
    "opencode": Dialect(
        lambda file: Call("read", {"filePath": file}),
        lambda file, old, new: Call("edit", {"filePath": file, "oldString": old, "newString": new}),
        lambda line: Call("bash", {"command": line, "description": "Count the lines"}),
    ),
    "qwen": Dialect(
        lambda file: Call("read_file", {"file_path": file}),
        lambda file, old, new: Call("edit", {"file_path": file, "old_string": old, "new_string": new}),
        lambda line: Call("run_shell_command", {"command": line, "is_background": False}),
    ),
    "aider": Dialect(
        lambda file: "Its lines are known.",
        lambda file, old, new: f"{file}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE",
        lambda line: "Its lines are counted.",
    ),
    "cline": Dialect(
        lambda file: Call("read_files", {"files": [{"path": file}]}),
        lambda file, old, new: Call("editor", {"path": file, "old_text": old, "new_text": new}),
        lambda line: Call("run_commands", {"commands": [line]}),
    ),
    "openclaw": Dialect(
        lambda file: Call("read", {"path": file}),
        lambda file, old, new: Call("edit", {"path": file, "edits": [{"oldText": old, "newText": new}]}),
        lambda line: Call("exec", {"command": line}),
    ),
    "pi": Dialect(
        lambda file: Call("read", {"path": file}),
        lambda file, old, new: Call("edit", {"path": file, "edits": [{"oldText": old, "newText": new}]}),
        lambda line: Call("bash", {"command": line}),
    ),
}


def steps(dialect: Dialect, file: str) -> list[Call | str]:
    """Return what the first nine answers ask for; the tenth is text alone."""
    edits = [dialect.edit(file, old, new) for old, new in zip(*_LINES, strict=True)]
    read, run = dialect.read(file), dialect.run(_CHECK.format(file=file))
    return [read, edits[0], run, read, edits[1], run, read, edits[2], run]


def answer(prompt: str, write_call: Callable[[Call], str]) -> str:
    """Return the answer to a rendered prompt; `write_call` words a call as the template teaches it."""
    tasks = list(_TASK.finditer(prompt))
    if not tasks:
        return "Fine."
    name, file = tasks[-1].groups()
    plan = steps(DIALECTS[name], file)
    if isinstance(plan[0], Call) and not _offers(prompt[: tasks[0].start()], plan[0].name):
        return "Ten times each number"
    done = [int(number) for number in _STEP.findall(prompt[tasks[-1].end() :])]
    step = max(done, default=0) + 1
    opening = "" if prompt.endswith("<think>\n") else "<think>\n"
    thought = f"{opening}The ledger is at place {step}.\n</think>\n\n"
    if step >= NUM_STEPS:
        return thought + f"Step {NUM_STEPS} of 10: all numbers are ten times themselves."
    wanted = plan[step - 1]
    text = wanted if isinstance(wanted, str) else write_call(wanted)
    return thought + f"Step {step} of 10: going on with the ledger.\n" + text


def _offers(prompt: str, tool: str) -> bool:
    return f'"name": "{tool}"' in prompt


def as_json(call: Call) -> str:
    """Return a call as Qwen2.5 and Qwen3 write it."""
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def as_elements(call: Call) -> str:
    """Return a call as Qwen3.5 writes it, an empty line behind the text."""
    values = {name: one if isinstance(one, str) else json.dumps(one) for name, one in call.arguments.items()}
    given = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"\n<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"
