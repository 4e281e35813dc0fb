"""README and docs name no flag, default, file or section that doesn't exist, and stay short.

What the site's reference names is in `tests/docs/`; `make docs` checks links as the site has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from reference_pages.pages import PAGES as REFERENCE
from stemma.cli import COMMANDS, guest_commands, load_command
from stemma.config.loading import setting_fields
from stemma.config.sizes import parse_size
from stemma.engine.async_engine import JOINING_INTERVAL_S

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = sorted(page for page in DOCS.rglob("*.md") if page.parent != DOCS / "reference")
"""Pages of the site that somebody wrote; the others are made from the code."""
PAGES = [ROOT / "README.md", *WRITTEN, *sorted((ROOT / "examples").rglob("*.md"))]
MAX_WORDS = 47_950
"""Of README and all written pages."""
MAX_PAST_WORDS = 10_300
"""Of decisions and log together."""
MAX_COLUMNS = 100
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


def page_params(pages: list[Path] = PAGES) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def words(*pages: Path) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def test_pages_stay_short() -> None:
    assert words(ROOT / "README.md", *WRITTEN) <= MAX_WORDS
    assert words(DOCS / "project" / "decisions.md", DOCS / "project" / "log.md") <= MAX_PAST_WORDS


def test_every_page_can_be_reached() -> None:
    listed = (ROOT / "zensical.toml").read_text()
    places = {*REFERENCE, *(str(page.relative_to(DOCS)) for page in WRITTEN)}
    assert {place for place in places if f'"{place}"' not in listed} == set()


@pytest.mark.parametrize("page", page_params([page for page in WRITTEN if page.parent.name != "project"]))
def test_lines_of_prose_can_be_read(page: Path) -> None:
    """Tables, pictures and what stands in a fence are as wide as they are."""
    parts = re.split(r"^```.*?^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for part in parts for line in part.splitlines() if not line.startswith(("|", "<", "!["))]
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


OF_OTHERS = ("log.md", "benchmarks.md", "compatibility.md")
"""Pages that tell of experiments, or of another server's settings."""
DEFAULT = re.compile(
    r"`(?:--)?(?P<name>[a-z][a-z0-9_-]+)`(?:(?P<cell> \| )| \(| )"
    r"(?P<value>`[a-z]\w*`|[\d.]+\d(?: ?[KMG]i?B)?|\d(?: ?[KMG]i?B)?|on|off|none)(?=[ ,;)|:.]|$)",
    re.MULTILINE,
)
"""``--keep-alive-s`` (5), ``--max-waiting`` 1024, or a row of a table of defaults."""


def named_defaults(text: str) -> Iterator[tuple[str, str]]:
    """Yield (setting, value) where a text says a setting's default."""
    is_table_of_defaults = False
    for line in text.splitlines():
        if re.match(r"\|[^`]*\|", line) and "---" not in line:
            is_table_of_defaults = "default" in line
        for found in DEFAULT.finditer(line):
            name, value = found["name"].replace("-", "_"), found["value"].strip("`")
            is_number = value[0].isdigit()
            if name in setting_fields() and (is_table_of_defaults if found["cell"] else is_number):
                yield name, value


def spelled(value: str) -> object:
    if value in ("on", "off", "none"):
        return {"on": True, "off": False, "none": None}[value]
    if not value[0].isdigit():
        return value
    return float(value) if value[-1].isdigit() else parse_size(value)


def wrong_defaults(text: str) -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in named_defaults(text)
        if (default := setting_fields()[name].info.default or None) != (spelled(value) or None)
        # A number for a setting without a default is what the server works out.
        and not (default is None and value[0].isdigit())
    ]


@pytest.mark.parametrize("page", page_params([page for page in PAGES if page.name not in OF_OTHERS]))
def test_defaults_that_pages_name_are_those_of_the_settings(page: Path) -> None:
    assert wrong_defaults(page.read_text()) == []


def test_a_wrong_default_is_found() -> None:
    table = "| setting | default |\n|---|---|\n| `prefetch` | `timeout` |\n"
    right, wrong = (
        "`--keep-alive-s` (10), `--max-waiting` 1024",
        "`--keep-alive-s` (11), `--max-waiting` 1 KiB",
    )
    assert len(list(named_defaults(f"{right}\n{table}"))) == 3
    assert wrong_defaults(f"{right}\n{table}") == []
    assert len(wrong_defaults(f"{wrong}\n{table}".replace("timeout", "off"))) == 2


def test_the_interval_that_joins_tokens_is_the_one_of_the_code() -> None:
    said = f"Default: {round(1000 * JOINING_INTERVAL_S)} "
    assert said in str(setting_fields()["stream_interval_ms"].info.description)


def flags_by_command() -> dict[str, set[str]]:
    """Return the flags of ``serve``, ``cache export`` and all others."""
    found: dict[str, set[str]] = {}

    def visit(name: str, command: click.Command) -> None:
        found[name] = {"--help", *(flag for one in command.params for flag in one.opts + one.secondary_opts)}
        for sub, inner in getattr(command, "commands", {}).items():
            visit(f"{name} {sub}", inner)

    for name in COMMANDS | guest_commands():
        visit(name, load_command(name))
    return found


def uses(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the first two words after each ``stemma``, and the flags up to the end of the command."""
    joined = text.replace("\\\n", " ")
    for match in re.finditer(r"\bstemma ([a-z]+)( [a-z]+)?([^`\n|)]*)", joined):
        yield [match[1], (match[2] or "").strip()], FLAG.findall(match[3])


def test_commands_have_the_flags_that_they_are_shown_with() -> None:
    known = flags_by_command()
    wrong = []
    for page in PAGES:
        for (command, sub), flags in uses(page.read_text()):
            of_command = known.get(f"{command} {sub}", known.get(command))
            if of_command is not None:
                wrong += [(page.name, command, sub, flag) for flag in flags if flag not in of_command]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """Return the names of a page's sections, as in links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", page_params())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if target.resolve().parent == DOCS / "reference":
            assert f"reference/{target.name}" in REFERENCE  # their sections: `make docs`
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", page_params())
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]+)`", page.read_text())
    assert [one for one in named if not (ROOT / one).exists()] == []
