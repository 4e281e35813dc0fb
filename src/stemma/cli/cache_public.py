"""`stemma cache publish`, `unpublish` and `published`: prefixes that all tenants of a server share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stemma.cli.admin_client import DEFAULT_URL, AdminKey, ask
from stemma.cli.cache_prompt import read_prompt, read_text
from stemma.errors import ConfigError


def publish_command(
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL,
    prompt: Annotated[str | None, typer.Option(help="The prefix's text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prefix's text.")] = None,
    token_ids: Annotated[Path | None, typer.Option(help="File with token ids, by spaces or commas.")] = None,
    system_file: Annotated[
        Path | None, typer.Option(help="File with a system message, which the chat template puts first.")
    ] = None,
    name: Annotated[str, typer.Option(help="What it is called in the list.")] = "",
    model: Annotated[str | None, typer.Option(help="An adapter of the server; default: its model.")] = None,
    admin_key: AdminKey = None,
) -> None:
    """Let all tenants of a server share the blocks of a prefix, and compute them."""
    if system_file is not None:
        if prompt is not None or prompt_file is not None or token_ids is not None:
            raise ConfigError("give either --system-file or a prompt")
        body: dict[str, Any] = {"messages": [{"role": "system", "content": read_text(system_file)}]}
    else:
        body = {"prompt": read_prompt(prompt, prompt_file, token_ids)}
    body |= {"name": name} | ({} if model is None else {"model": model})
    made = ask(url, "POST", "/admin/cache/publish", admin_key, json=body)
    typer.echo(
        f"{made['publish_id']}: {made['num_public_tokens']} of {made['num_prompt_tokens']} tokens are public"
    )
    if not made["is_kept"]:
        typer.echo("a restart drops it: the server has no --public-prefixes FILE")


def unpublish_command(
    publish_id: Annotated[str, typer.Argument(help="As `stemma cache published` shows it.")],
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Share a published prefix no longer."""
    gone = ask(url, "POST", "/admin/cache/unpublish", admin_key, json={"publish_id": publish_id})
    typer.echo(f"{gone['num_public_tokens']} tokens are public no longer")


def published_command(
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL, admin_key: AdminKey = None
) -> None:
    """List the published prefixes of a server."""
    for one in ask(url, "GET", "/admin/cache/published", admin_key)["published"]:
        typer.echo(f"{one['publish_id']}  {one['num_public_tokens']} tokens  {one['name']}")
