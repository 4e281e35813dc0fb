"""The agents: how each is started without a person, in a home of its own, against one server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.conformance.agents.tiny import CONTEXT, ROOT

INSTALLED = Path(os.environ.get("AGENTS_DIRECTORY", ROOT / ".venv" / "agents"))
"""Where `.ci/agents` puts them."""
_NOWHERE = "http://127.0.0.1:9"
"""A proxy that isn't there: agents reach this machine alone."""


@dataclass(frozen=True)
class Place:
    """Where an agent runs, and which model it asks."""

    home: Path
    work: Path
    url: str
    model: str


@dataclass(frozen=True)
class Agent:
    """One way to run one agent."""

    package: str
    """Its name in the registry."""
    program: str
    """Below `INSTALLED`; may be a pattern."""
    arguments: Callable[[Place, str], list[str]]
    """Given the prompt."""
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    files: Callable[[Place], Mapping[str, Any]] = lambda place: {}
    """Files of its home: text, or what becomes JSON."""
    dialect: str = ""
    """"": its own name."""
    serves: str = ""
    """The name that it asks for the model by; "": that of its directory."""
    num_moved: int = 0
    """Tokens of its own text that it puts behind each turn anew, or writes otherwise than the answer did."""
    shared: float = 0.9
    """Part of the first prompt that stands before what the user says, in its second session."""
    says_turns: bool = False
    """Each step is a message of the user's, a line of stdin; else the first message is all that it gets."""

    def is_installed(self) -> bool:
        """Return whether its program is there."""
        return next(INSTALLED.glob(self.program), None) is not None

    def version(self) -> str:
        """Return the installed version."""
        if (manifest := INSTALLED / "node_modules" / self.package / "package.json").exists():
            return str(json.loads(manifest.read_text())["version"])
        [found] = INSTALLED.glob(f"*/lib/python*/site-packages/{self.package.replace('-', '_')}-*.dist-info")
        return found.name.split("-")[1].removesuffix(".dist")


def _opencode(place: Place) -> dict[str, Any]:
    model = {"name": "tiny", "limit": {"context": CONTEXT, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Stemma",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {place.model: model},
    }
    named = f"stemma/{place.model}"
    settings = {"autoupdate": False, "share": "disabled", "model": named, "small_model": named}
    return {".config/opencode/opencode.json": settings | {"provider": {"stemma": provider}}}


def _codex(place: Place) -> dict[str, str]:
    return {
        ".codex/config.toml": (
            f'model = "{place.model}"\nmodel_provider = "stemma"\ncheck_for_update_on_startup = false\n'
            f'[model_providers.stemma]\nname = "Stemma"\nbase_url = "{place.url}/v1"\n'
            'wire_api = "responses"\n'
            "[analytics]\nenabled = false\n"
        )
    }


def _pi(place: Place) -> dict[str, Any]:
    provider = {
        "baseUrl": f"{place.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": place.model, "contextWindow": CONTEXT, "maxTokens": 8192}],
    }
    return {".pi/agent/models.json": {"providers": {"stemma": provider}}}


def _cline(place: Place) -> dict[str, Any]:
    settings = {
        "provider": "openai-compatible",
        "apiKey": "none",
        "model": place.model,
        "baseUrl": f"{place.url}/v1",
    }
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"openai-compatible": provider}
    chosen = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": providers}
    return {".cline/data/settings/providers.json": chosen}


def _openclaw(place: Place) -> dict[str, Any]:
    model = {
        "id": place.model,
        "name": place.model,
        "contextWindow": CONTEXT,
        "maxTokens": 8192,
        "input": ["text"],
    }
    provider = {
        "baseUrl": f"{place.url}/v1",
        "apiKey": "none",
        "api": "openai-completions",
        "models": [model],
    }
    settings = {
        "models": {"mode": "replace", "providers": {"stemma": provider}},
        "agents": {"defaults": {"model": {"primary": f"stemma/{place.model}"}, "workspace": str(place.work)}},
    }
    return {".openclaw/openclaw.json": settings}


def _claude(place: Place, **others: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": place.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",  # else it won't skip its questions as root
        **others,
    }


def _openai(place: Place) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": place.model}


_CODEX = Agent(
    "@openai/codex",
    "node_modules/.bin/codex",
    lambda place, prompt: [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        prompt,
    ],
    files=_codex,
)
_CLAUDE = Agent(
    "@anthropic-ai/claude-code",
    "node_modules/@anthropic-ai/claude-code-*/claude",
    lambda place, prompt: ["-p", "--dangerously-skip-permissions", prompt],
    _claude,
    dialect="claude",
    num_moved=64,  # it adds a field to the arguments of an edit, in front
)
AGENTS = {
    "claude-code": _CLAUDE,
    "claude-code-no-betas": replace(
        _CLAUDE,
        environment=lambda place: _claude(place, CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS="1"),
    ),
    "codex": _CODEX,
    # With a model that it knows, its tools are others: a patch in a grammar of its own.
    "codex-known-model": replace(_CODEX, serves="gpt-5.5", dialect="codex_patch"),
    "opencode": Agent(
        "opencode-ai",
        "node_modules/opencode-linux-*/bin/opencode",
        lambda place, prompt: ["run", prompt],
        lambda place: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        _opencode,
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        "node_modules/.bin/qwen",
        lambda place, prompt: ["--auth-type", "openai", "--yolo", prompt],
        _openai,
        lambda place: {
            ".qwen/settings.json": {
                "telemetry": {"enabled": False},
                "privacy": {"usageStatisticsEnabled": False},
                "general": {"enableAutoUpdate": False},
            }
        },
        dialect="qwen",
    ),
    "pi": Agent(
        "@mariozechner/pi-coding-agent",
        "node_modules/.bin/pi",
        lambda place, prompt: ["-p", "--offline", "--provider", "stemma", "--model", place.model, prompt],
        files=_pi,
    ),
    "cline": Agent(
        "cline",
        "node_modules/.bin/cline",
        lambda place, prompt: ["-P", "openai-compatible", "-m", place.model, prompt],
        files=_cline,
    ),
    "openclaw": Agent(
        "openclaw",
        "node_modules/.bin/openclaw",
        lambda place, prompt: ["agent", "--local", "--session-id", os.urandom(8).hex(), "-m", prompt],
        files=_openclaw,
        num_moved=256,  # the state of its processes is the last message, always
    ),
    "aider": Agent(
        "aider-chat",
        "aider/bin/aider",
        lambda place, prompt: [
            *("--model", f"openai/{place.model}", "--edit-format", "diff", "--no-git", "--no-auto-lint"),
            *(
                "--no-check-update",
                "--analytics-disable",
                "--no-show-model-warnings",
                "--no-show-release-notes",
            ),
            *("--yes-always", "--no-pretty", "--no-fancy-input", "--no-detect-urls", "ledger.txt"),
        ],
        lambda place: {
            "OPENAI_API_BASE": f"{place.url}/v1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        num_moved=1536,  # the file and its rules of editing are the last messages, always
        shared=0.65,
        says_turns=True,
    ),
}


@dataclass(frozen=True)
class Ran:
    """How a run ended."""

    code: int | None
    """None: it was ended, since it took too long."""
    output: str


def run(agent: Agent, place: Place, prompts: list[str], timeout_s: float) -> Ran:
    """Let an agent do a task in `place.work`; all that it started is ended afterwards."""
    for name, content in agent.files(place).items():
        file = place.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    program = min(INSTALLED.glob(agent.program))  # of several builds for this machine any
    process = subprocess.Popen(
        [str(program), *agent.arguments(place, prompts[0])],
        cwd=place.work,
        env=_environment(agent, place),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    said = "".join(f"{one}\n" for one in prompts) if agent.says_turns else ""
    try:
        output, _ = process.communicate(said, timeout_s)
        return Ran(process.returncode, output)
    except subprocess.TimeoutExpired:
        _end(place.home)
        return Ran(None, process.communicate()[0])
    finally:
        _end(place.home)


def _end(home: Path) -> None:
    """End all processes of a home: some agents leave others behind, in sessions of their own."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


def _environment(agent: Agent, place: Place) -> dict[str, str]:
    home = place.home
    node = str(next(INSTALLED.glob("node/node_modules/node-*/bin"), Path("/usr/bin")))
    return {
        "PATH": os.pathsep.join([node, "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "HTTP_PROXY": _NOWHERE,
        "HTTPS_PROXY": _NOWHERE,
        "http_proxy": _NOWHERE,
        "https_proxy": _NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        **agent.environment(place),
    }
