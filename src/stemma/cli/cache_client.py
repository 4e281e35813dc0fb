"""What the commands of `stemma cache` that ask a running server have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from stemma.errors import ConfigError, StorageError
from stemma.http import http_client

AdminKey = Annotated[str | None, typer.Option(envvar="STEMMA_ADMIN_KEY", help="Its admin key.")]


def call(
    url: str, method: str, path: str, body: dict[str, Any] | None, admin_key: str | None
) -> dict[str, Any]:
    """Ask a server; return its answer. Raises StorageError with the server's message."""
    try:
        with http_client(headers=headers(admin_key), timeout=600.0) as client:
            response = client.request(method, f"{url.rstrip('/')}{path}", json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StorageError(f"{url}: {error}") from error
    if response.status_code != 200:
        raise StorageError(message(response.content, response.status_code))
    return dict(response.json())


def read_prompt(prompt: str | None, prompt_file: Path | None, token_ids: Path | None) -> str | list[int]:
    """Return the prompt that one of the three gives: text or token ids. Raises ConfigError."""
    given = [one for one in (prompt, prompt_file, token_ids) if one is not None]
    if len(given) != 1:
        raise ConfigError("give exactly one of --prompt, --prompt-file and --token-ids")
    try:
        if prompt_file is not None:
            return prompt_file.read_text()
        if token_ids is not None:
            return [int(word) for word in token_ids.read_text().replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the prompt: {error}") from error
    assert prompt is not None
    return prompt


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the prompt: {error}") from error


def headers(admin_key: str | None) -> dict[str, str]:
    """Return the headers that carry the admin key, if there is one."""
    return {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}


def message(content: bytes, status: int) -> str:
    """Return what a server says in an answer other than 200."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
