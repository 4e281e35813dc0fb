"""The README's picture of the demo, from a run of it: `python -m benchmarks.demo_picture docs/demo.svg`."""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

SHOWN = ("1", "5", "8")
"""Numbers of the scenes in the picture."""
COLUMNS = 80
_FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""rich's own names fonts of another host."""
_CONTROL = re.compile(r"\x1b\[(?![0-9;]*m)[0-9;?]*[A-Za-z]")


def printed(command: list[str]) -> str:
    """Return what a command prints on a terminal, colours included. Raises SystemExit if it fails."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environ) as process:
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # a terminal ends so
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"the demo ended with {process.returncode}")
    lines = (line.rsplit("\r", 1)[-1] for line in written.decode().replace("\r\n", "\n").split("\n"))
    return "\n".join(_CONTROL.sub("", line) for line in lines)


def scenes(text: str) -> str:
    """Return the scenes that are shown."""
    parts = re.split(r"^(?=(?:\x1b\[[0-9;]*m)*\d\. )", text, flags=re.MULTILINE)
    chosen = [part for part in parts if re.match(rf"(?:\x1b\[[0-9;]*m)*(?:{'|'.join(SHOWN)})\. ", part)]
    return "".join(chosen).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    text = scenes(printed([sys.executable, "-m", "stemma", "demo"]))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    given.file.write_text(console.export_svg(title="stemma demo", code_format=_FORMAT, unique_id="demo"))


if __name__ == "__main__":
    main()
