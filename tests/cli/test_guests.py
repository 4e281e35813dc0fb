"""Commands that packages beside the core bring."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from stemma import guests
from stemma.cli import COMMANDS, GROUP, guest_commands, make_app
from stemma.errors import ConfigError

GREETINGS = {
    "greet": (f"{__name__}:greet", "Say a word."),
    "serve": ("nowhere:at_all", "Not ours."),
}


def greet() -> None:
    """Say a word."""
    print("a word")


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    guest_commands.cache_clear()
    yield
    guest_commands.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint(name="a-guest", value=value, group=GROUP) for value in values]
    monkeypatch.setattr(guests, "entry_points", lambda group: points)


def test_a_command_of_a_package_that_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"stemma replay comes with stemma-lab.*pip install \./packages/lab"
    ):
        CliRunner().invoke(make_app(), ["replay", "--help"], catch_exceptions=False)
    assert "replay" not in CliRunner().invoke(make_app(), ["--help"]).output


def test_a_packages_command_is_listed_and_runs_and_takes_no_name_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, f"{__name__}:GREETINGS")
    assert list(guest_commands()) == ["greet"]
    assert "Say a word." in CliRunner().invoke(make_app(), ["--help"]).output
    assert CliRunner().invoke(make_app(), ["greet"]).output == "a word\n"


def test_a_package_that_cannot_be_imported_harms_no_other_command(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "no_such_module:COMMANDS")
    result = CliRunner().invoke(make_app(), ["--help"])
    assert result.exit_code == 0
    assert "no_such_module" in result.stderr
    assert all(name in result.output for name in COMMANDS)
