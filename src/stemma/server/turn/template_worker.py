"""The process that renders templates which clients sent: little memory, and it dies at its time limit.

Reads and writes frames (4 bytes big-endian length, JSON) on stdin and stdout. Started by
`template_process.py`; ends when its stdin ends.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from transformers.utils.chat_template_utils import render_jinja_template

_LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 512 * 2**20
"""On top of what the process has when it starts."""
_MAX_REASON_CHARS = 300


def main() -> None:
    """Serve frames until stdin ends."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    _limit_memory()
    while (job := _read(stdin)) is not None:
        # The default action of the signal ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_REAL, job["limit_s"])
        answer = json.dumps(_render(job)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        stdout.write(_LENGTH.pack(len(answer)) + answer)
        stdout.flush()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _read(stdin: BinaryIO) -> dict[str, Any] | None:
    head = stdin.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    job: dict[str, Any] = json.loads(stdin.read(_LENGTH.unpack(head)[0]))
    return job


def _render(job: dict[str, Any]) -> dict[str, str]:
    try:
        rendered: Any = render_jinja_template(
            conversations=[job["messages"]],
            tools=job["tools"],
            chat_template=job["template"],
            add_generation_prompt=job["add_generation_prompt"],
            continue_final_message=job["continue_final_message"],
            **job["arguments"],
        )
    except Exception as error:  # noqa: BLE001 - a template is a program: it may fail in any way
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]}
    text = str(rendered[0][0])
    if len(text) > job["max_chars"]:
        return {"error": f"the rendered prompt has {len(text)} characters; the limit is {job['max_chars']}"}
    return {"text": text}


if __name__ == "__main__":
    main()
