"""`stemma launch` with a program in an agent's place, which tells what it was started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stemma.cli.launch import LAUNCHES

ROOT = Path(__file__).parents[2]
FAKE = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name in LAUNCHES:
        (tmp_path / name).write_text(FAKE.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launch(path: Path | str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with `path` as PATH."""
    environment = {
        "PATH": str(path),
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": os.environ["HOME"],
        **variables,
    }
    command = [sys.executable, "-m", "stemma", "launch", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_claude_gets_variables(programs: Path, live_url: str) -> None:
    done = launch(
        programs, "claude", "--url", f"{live_url}/v1", "--", "-p", "Hello.", STEMMA_API_KEY="secret"
    )

    arguments, variables = json.loads(done.stdout)
    assert arguments == ["-p", "Hello."]
    assert variables["ANTHROPIC_BASE_URL"] == live_url
    assert variables["ANTHROPIC_MODEL"] == "scripted"
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"


def test_codex_gets_settings(programs: Path, live_url: str) -> None:
    done = launch(programs, "codex", "--url", live_url, "--", "exec", "Hello.")

    arguments, variables = json.loads(done.stdout)
    assert f'model_providers.stemma.base_url="{live_url}/v1"' in arguments
    assert 'model="scripted"' in arguments
    assert arguments[-2:] == ["exec", "Hello."]
    assert variables["STEMMA_API_KEY"] == "none"


def test_opencode_gets_settings(programs: Path, live_url: str) -> None:
    done = launch(programs, "opencode", "--url", live_url)

    settings = json.loads(json.loads(done.stdout)[1]["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == "stemma/scripted"
    assert settings["provider"]["stemma"]["options"]["baseURL"] == f"{live_url}/v1"
    assert settings["provider"]["stemma"]["models"]["scripted"]["limit"]["context"] == 4096


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clod"], "there is no agent 'clod' here; choose one of claude, codex, opencode"),
        (["claude", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: "),
    ],
)
def test_what_is_missing_is_said(programs: Path, arguments: list[str], said: str) -> None:
    done = launch(programs, *arguments)

    assert done.returncode == 2
    assert said in done.stderr


def test_an_agent_that_is_not_installed(tmp_path: Path, live_url: str) -> None:
    done = launch(tmp_path, "codex", "--url", live_url)

    assert done.returncode == 2
    assert "codex isn't installed, or not on the PATH" in done.stderr


def test_a_model_that_is_not_served(programs: Path, live_url: str) -> None:
    done = launch(programs, "claude", "--url", live_url, "--model", "other")

    assert "doesn't serve 'other', but scripted" in done.stderr
