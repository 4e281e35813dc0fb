from __future__ import annotations

import pytest
from typer.testing import CliRunner

from stemma.cli import load_command, make_app
from stemma.cli.synonyms import SYNONYMS, translate
from stemma.config.loading import load_settings, setting_fields
from stemma.errors import ConfigError

SERVE = load_command("serve")
KNOWN = frozenset(flag for one in SERVE.params for flag in (*one.opts, *one.secondary_opts))
COMMANDS = (
    "--model org/name --served-model-name gpt --max-model-len 4096 --gpu-memory-utilization 0.8 --api-key x",
    "--model-path org/name --context-length 4096 --tp 2 --mem-fraction-static 0.8 --disable-radix-cache",
    "-m file.gguf -c 4096 -np 4 -t 2 -ngl 99 -fa on --jinja --chat-template-file t.jinja -a gpt",
)
"""Of vLLM, SGLang and llama.cpp."""


def parsed(*arguments: str) -> tuple[dict[str, object], list[str]]:
    """Return what `serve` gets, and the lines that its user sees."""
    lines: list[str] = []
    ctx = SERVE.make_context("serve", translate(list(arguments), KNOWN, lines.append))
    fields = setting_fields()
    return {name: value for name, value in ctx.params.items() if value is not None and name in fields}, lines


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_other_servers_are_understood(line: str) -> None:
    given, lines = parsed(*line.split())
    settings = load_settings(flags=given)

    assert settings.engine.model.max_model_len == 4096
    assert str(settings.engine.model.path) in ("org/name", "file.gguf")
    assert len(lines) >= 3
    assert all(line.startswith("-") for line in lines)


def test_each_meaning_is_a_flag_of_ours() -> None:
    ours = {meaning.flag.partition("=")[0] for meaning in SYNONYMS.values() if meaning.flag} - {"MODEL"}
    assert ours - KNOWN == set()


def test_what_a_number_counts_goes_along() -> None:
    given, _ = parsed("m", "--swap-space", "4")
    assert load_settings(flags=given).engine.tiers.host_cache == 4 << 30
    given, _ = parsed("m", "--cache-ram=512")
    assert load_settings(flags=given).engine.tiers.host_cache == 512 << 20


def test_a_flag_of_ours_keeps_its_meaning() -> None:
    assert not set(SYNONYMS) & KNOWN
    assert parsed("m", "--block-size", "32")[1] == []
    assert translate(["--", "-c", "1"], KNOWN, print) == ["--", "-c", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m", "--download-dir", "/x"], "set HF_HOME"),
        (["m", "--speculative-config", "{}"], "take --speculation auto"),
        (["m", "-ctk", "q8_0"], "take --kv-cache-dtype int8"),
        (["m", "-c"], "-c needs a value"),
    ],
)
def test_what_has_no_meaning_says_what_to_do(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(*arguments)


def test_help_fits_a_terminal_and_names_what_people_use() -> None:
    def told(*arguments: str) -> str:
        return CliRunner().invoke(make_app(), ["serve", *arguments], terminal_width=80).output

    short, whole = told("--help"), told("-h", "all")
    assert all(len(line) <= 80 for line in (short + whole).splitlines())
    assert len(short.splitlines()) < 60
    assert "--disk-cache " in short
    assert "--history-memory" not in short
    assert "--tls-key-password-file" in whole
    assert "[default: yes,no]" in " ".join(whole.split())
