"""`stemma launch`: a coding agent in this terminal, with a running server as its model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from stemma.cli.admin_client import DEFAULT_URL, ask
from stemma.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """What an agent is started with before the arguments of the person who starts it."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def _claude(url: str, model: str, key: str, window: int) -> Launch:
    return Launch(
        environment={
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(window),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(url: str, model: str, key: str, window: int) -> Launch:
    settings = {
        "model": model,
        "model_provider": "stemma",
        "model_context_window": window,
        "model_providers.stemma.name": "Stemma",
        "model_providers.stemma.base_url": f"{url}/v1",
        "model_providers.stemma.wire_api": "responses",
        "model_providers.stemma.env_key": "STEMMA_API_KEY",
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(tuple(flags), {"STEMMA_API_KEY": key})


def _opencode(url: str, model: str, key: str, window: int) -> Launch:
    described = {"name": model, "limit": {"context": window, "output": window // 4}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Stemma",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: described},
    }
    named = f"stemma/{model}"
    settings = {"model": named, "small_model": named, "provider": {"stemma": provider}}
    return Launch(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


LAUNCHES: dict[str, Callable[[str, str, str, int], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}
"""By program: given the server's root, its model, a key and the length of a context in tokens."""


def command(
    agent: Annotated[str, typer.Argument(metavar="|".join(LAUNCHES), help="The agent's program.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own, behind `--`.")] = None,
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="The model to ask for; the first that it serves.")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="STEMMA_API_KEY", help="Bearer token.")] = None,
) -> None:
    """Run a coding agent against a running server: claude, codex or opencode."""
    if agent not in LAUNCHES:
        raise ConfigError(f"there is no agent {agent!r} here; choose one of {', '.join(LAUNCHES)}")
    if (program := shutil.which(agent)) is None:
        raise ConfigError(f"{agent} isn't installed, or not on the PATH")
    root = url.rstrip("/").removesuffix("/v1")
    windows = {one["id"]: one["max_model_len"] for one in ask(root, "GET", "/v1/models", api_key)["data"]}
    name = model or next(iter(windows))
    if name not in windows:
        raise ConfigError(f"{root} doesn't serve {name!r}, but {', '.join(windows)}")
    launch = LAUNCHES[agent](root, name, api_key or "none", windows[name])
    os.execve(program, [program, *launch.arguments, *(arguments or [])], os.environ | launch.environment)
