"""Every script in examples/ runs against the server as it stands.

Two clients can't be installed beside the others: `text-generation` pins huggingface_hub below 1.0, `litellm`
pins openai below 3. Their scripts run with the interpreter of an environment that has them, if a variable
names it.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = {
    "openai_chat": ("openai", "cached: "),
    "openai_tools": ("openai", "report: city="),
    "openai_responses": ("openai", "cached: "),
    "anthropic_messages": ("anthropic", "call: water_level {'city': "),
    "huggingface_client": ("huggingface_hub", "chat: "),
    "langchain_client": ("langchain_openai", "report: city="),
}
"""Script -> (the package it needs, something it prints)."""
ELSEWHERE = {
    "text_generation_client": ("text_generation", "STEMMA_TEXT_GENERATION_PYTHON", "stream: "),
    "litellm_client": ("litellm", "STEMMA_LITELLM_PYTHON", "report: {'city'"),
}
"""Script -> (the package it needs, the variable that names an interpreter, something it prints)."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("script", CLIENTS)
def test_the_script_runs(
    url: str,
    examples: Path,
    script: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, expected = CLIENTS[script]
    pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [script, url])
    runpy.run_path(str(examples / f"{script}.py"), run_name="__main__")

    assert expected in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("script", ELSEWHERE)
def test_the_script_runs_in_its_own_environment(url: str, examples: Path, script: str) -> None:
    package, variable, expected = ELSEWHERE[script]
    python = os.environ.get(variable)
    if python is None and importlib.util.find_spec(package) is not None:
        python = sys.executable
    if python is None:
        pytest.skip(f"{package} is not installed; {variable} may name a Python that has it")
    done = subprocess.run(
        [python, str(examples / f"{script}.py"), url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )

    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_every_script_is_run(examples: Path) -> None:
    assert {path.stem for path in examples.glob("*.py")} == {*CLIENTS, *ELSEWHERE}
