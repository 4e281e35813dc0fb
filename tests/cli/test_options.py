from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stemma.cli import load_command
from stemma.cli.options import with_settings_flags
from stemma.config.loading import flag_of, load_settings, setting_fields
from stemma.errors import ConfigError


def parse(*arguments: str) -> dict[str, Any]:
    """Return the flat settings that a command line gives."""
    seen: dict[str, Any] = {}

    def command(own: str = "x", **flags: Any) -> None:
        seen.update(flags)

    application = typer.Typer()
    application.command()(with_settings_flags(command))
    result = CliRunner().invoke(application, list(arguments))
    assert result.exit_code == 0, result.output
    return {name: value for name, value in seen.items() if value is not None}


def test_every_setting_is_a_flag_with_a_word_of_help() -> None:
    serve = load_command("serve")
    options = {parameter.opts[0]: parameter for parameter in serve.params}

    for name in setting_fields():
        if name != "model":
            assert options[flag_of(name)].help, name


def test_own_options_keep_their_declarations() -> None:
    doctor = load_command("doctor")
    options = {parameter.opts[0]: parameter for parameter in doctor.params}

    assert options["--config"].help
    assert options["--json"].help == "Print JSON."
    assert "--as-json" not in options


def test_named_paths_may_be_repeated() -> None:
    given = parse(
        "m", "--lora", "sql=adapters/sql", "--lora", "poems=p,songs=s", "--pool-configs", "redis=r.json"
    )
    settings = load_settings(flags=given)
    assert settings.engine.lora.adapters == {
        "sql": Path("adapters/sql"),
        "poems": Path("p"),
        "songs": Path("s"),
    }
    assert settings.server.pool_configs == {"redis": Path("r.json")}
    for bad in (["a"], ["a=x", "a=y"], ["=x"]):
        with pytest.raises(ConfigError, match="--lora"):
            load_settings(flags={"model": "m", "lora": bad})


def test_flags_are_parsed_and_absent_ones_stay_unset() -> None:
    given = parse(
        "path/to/model", "--block-size", "32", "--no-enable-prefix-cache", "--kv-cache-memory", "4GB"
    )

    assert {name: str(value) for name, value in given.items()} == {
        "model": "path/to/model",
        "block_size": "32",
        "enable_prefix_cache": "False",
        "kv_cache_memory": "4GB",
    }
