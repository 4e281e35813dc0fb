"""`stemma cache`: inspect and clean disk caches; export and import prefixes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stemma.cli.admin_client import AdminKey, answer, ask
from stemma.cli.cache_kept import drop_kept, is_beside_blocks, show_kept
from stemma.cli.cache_prompt import read_prompt
from stemma.cli.cache_public import publish_command, published_command, unpublish_command
from stemma.cli.progress import CommandProgress, open_progress
from stemma.config.durations import parse_duration
from stemma.config.sizes import format_size, parse_size
from stemma.config.words import read_secret
from stemma.errors import ConfigError, StorageError, StorageLocked

if TYPE_CHECKING:
    from stemma.memory.tiers.disk.disk_store import DiskStore
    from stemma.types import TokenArray

app = typer.Typer(no_args_is_help=True, help="Inspect and clean disk caches, export and import prefixes.")
app.command("publish")(publish_command)
app.command("unpublish")(unpublish_command)
app.command("published")(published_command)

Directory = Annotated[
    Path, typer.Argument(help="Directory that --disk-cache names, or --batch-directory, or a --ledger file.")
]
Space = Annotated[
    str | None, typer.Option("--space", help="Sub-directory, by the start of its name; default: all.")
]
Url = Annotated[str | None, typer.Option(help="A running server, e.g. http://127.0.0.1:8000.")]
KeyFile = Annotated[
    Path | None, typer.Option(help="With --dir: file with the secret that signs exported files.")
]
Salt = Annotated[str, typer.Option(help="Namespace, as `cache_salt` in requests.")]
TenantName = Annotated[str, typer.Option(help="Whose blocks, on a server with --api-keys-file.")]


@app.command("ls")
def ls_command(directory: Directory) -> None:
    """List the models whose blocks are in a directory; or what a directory of batches or a ledger holds."""
    from stemma.memory.tiers.disk.existing import held_blocks, unreadable
    from stemma.memory.tiers.disk.spaces import list_spaces
    from stemma.server.history.log import FILE_NAME, count_answers

    if is_beside_blocks(directory):
        show_kept(directory)
        return
    for space in list_spaces(directory):
        manifest, held = space.manifest, held_blocks(space)
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(space.used_at))
        state = "in use" if space.in_use else "not in use"
        size = f"{format_size(space.allocated_bytes)} on disk{held.note}"
        typer.echo(f"{space.path.name}  {held.num_blocks} blocks, {size}, last change {used}, {state}")
        if manifest is None:
            typer.echo("    damaged: `stemma cache gc` removes it")
            continue
        typer.echo(f"    model {manifest.model_fingerprint[:16]}, {manifest.block_size} tokens a block")
        typer.echo(f"    layout {manifest.kv_layout}")
        if num_answers := count_answers(space.path / FILE_NAME):
            typer.echo(f"    {num_answers} answers")
        if (reason := unreadable(space)) is not None:
            typer.echo(f"    {reason}")


@app.command("verify")
def verify_command(directory: Directory, space: Space = None) -> None:
    """Read every block and drop those that are damaged; exit status 1 if there were any."""
    num_bad = 0
    for store in _stores(directory, space):
        name = store.path.name
        with open_progress(f"reading {name}") as progress:
            found = store.verify(partial(_report_share, progress, f"reading {name}"))
        bad = {reason: count for reason, count in found.items() if reason != "ok"}
        num_bad += sum(bad.values())
        detail = ", ".join(f"{count} {reason}" for reason, count in bad.items()) or "none damaged"
        typer.echo(f"{store.path.name}: {found['ok']} blocks sound, {detail}")
    if num_bad:
        raise typer.Exit(1)


@app.command("gc")
def gc_command(
    directory: Directory,
    unused_for: Annotated[
        str | None, typer.Option(help="Drop blocks and answers unused for this time: 12h, 7d.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Delete the least recently used models until the rest fits, e.g. 50GB.")
    ] = None,
) -> None:
    """Delete damaged sub-directories, unused blocks and unused models. Sub-directories in use are kept.

    Of a directory of batches, or a usage ledger's file, delete what is older than --unused-for.
    """
    from stemma.memory.tiers.disk.existing import open_existing, unreadable
    from stemma.memory.tiers.disk.spaces import list_spaces, remove_space
    from stemma.server.history.log import FILE_NAME, drop_unused

    age_s = None if unused_for is None else parse_duration(unused_for)
    if is_beside_blocks(directory):
        if age_s is None:
            raise ConfigError(f"{directory} holds no blocks; say how old what goes must be: --unused-for 30d")
        drop_kept(directory, age_s)
        return
    limit = None if max_size is None else parse_size(max_size)
    total = sum(space.allocated_bytes for space in list_spaces(directory))
    for space in list_spaces(directory):
        too_old = age_s is not None and time.time() - space.used_at > age_s
        too_much = limit is not None and total > limit
        if space.in_use:
            typer.echo(f"{space.path.name}: in use, left alone")
        elif space.manifest is None or too_old or too_much:
            remove_space(space.path)
            total -= space.allocated_bytes
            typer.echo(f"{space.path.name}: removed, {format_size(space.allocated_bytes)} free")
        elif age_s is not None:
            if (reason := unreadable(space)) is not None:
                typer.echo(f"{space.path.name}: {reason}")
                continue
            store = open_existing(space)
            num_blocks = store.drop_unused(age_s)
            num_answers = drop_unused(space.path / FILE_NAME, age_s)  # the store holds the lock
            store.close()
            typer.echo(f"{space.path.name}: {num_blocks} blocks, {num_answers} answers dropped")


@app.command("clear")
def clear_command(directory: Directory, space: Space = None) -> None:
    """Delete all blocks, of one model or of all. Sub-directories in use are kept."""
    from stemma.memory.tiers.disk.spaces import list_spaces, remove_space

    for found in list_spaces(directory):
        if not found.path.name.startswith(space or ""):
            continue
        try:
            remove_space(found.path)
        except StorageLocked as error:
            typer.echo(f"{found.path.name}: {error}")
            continue
        typer.echo(f"{found.path.name}: removed, {format_size(found.allocated_bytes)} free")


@app.command("export")
def export_command(
    output: Annotated[Path, typer.Argument(help="File to write.")],
    url: Url = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="A disk cache instead of a server.")] = None,
    space: Space = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt's text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt's text.")] = None,
    token_ids: Annotated[Path | None, typer.Option(help="File with token ids, by spaces or commas.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; with --dir and text, to tokenize.")] = None,
    salt: Salt = "",
    tenant: TenantName = "",
    admin_key: AdminKey = None,
    key_file: KeyFile = None,
    public_prefixes: Annotated[
        Path | None, typer.Option(help="With --dir: list of published prefixes of its server.")
    ] = None,
) -> None:
    """Write the cached blocks of a prompt to a file, from a running server or from a disk cache."""
    given = read_prompt(prompt, prompt_file, token_ids)
    draft = output.with_name(output.name + ".new")
    try:
        with open_progress("exporting"):
            if directory is not None:
                tokens = _tokens(given, model)
                count = _export_from_directory(
                    draft, directory, space, tokens, salt, key_file, public_prefixes
                )
            elif url is not None:
                count = _export_from_server(draft, url, {"prompt": given, **_where(salt, tenant)}, admin_key)
            else:
                raise ConfigError("say where from: --url or --dir")
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)
    typer.echo(f"{count} blocks, {format_size(output.stat().st_size)} in {output}")


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="An exported file.")],
    url: Url = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="A disk cache instead of a server.")] = None,
    size: Annotated[
        str | None, typer.Option(help="With --dir: its size limit; default: its size plus the file's.")
    ] = None,
    salt: Salt = "",
    tenant: TenantName = "",
    admin_key: AdminKey = None,
    key_file: KeyFile = None,
    trust_imports: Annotated[
        bool, typer.Option("--trust-imports", help="With --dir: accept a file that --key-file can't verify.")
    ] = False,
) -> None:
    """Import the blocks of an exported file into a running server or a disk cache.

    The writer of the file decides what the model says after its prompt. A server's own settings decide which
    files it accepts.
    """
    with open_progress("importing"):
        if directory is not None:
            limit = None if size is None else parse_size(size)
            count = _import_to_directory(file, directory, limit, key_file, trust_imports)
        elif url is not None:
            count = _import_to_server(file, url, _where(salt, tenant), admin_key)
        else:
            raise ConfigError("say where to: --url or --dir")
    typer.echo(f"{count} new blocks")


def _report_share(progress: CommandProgress, stage: str, num_done: int, total: int) -> None:
    progress(stage, num_done / max(1, total))


def _stores(directory: Path, space: str | None) -> Iterator[DiskStore]:
    from stemma.memory.tiers.disk.existing import open_existing, unreadable
    from stemma.memory.tiers.disk.spaces import list_spaces

    for found in list_spaces(directory):
        if found.path.name.startswith(space or "") and found.manifest is not None:
            if (reason := unreadable(found)) is not None:
                typer.echo(f"{found.path.name}: {reason}")
                continue
            store = open_existing(found)
            yield store
            store.close()


def _tokens(given: str | list[int], model: Path | None) -> TokenArray:
    from stemma.types import as_tokens

    if isinstance(given, list):
        return as_tokens(given)
    if model is None:
        raise ConfigError("with --dir, text needs --model to be tokenized; or give --token-ids")
    from stemma.model.load.located import located_path
    from stemma.model.text.tokenizer import Tokenizer

    return Tokenizer(located_path(model)).encode(given)


def _export_from_directory(
    draft: Path,
    directory: Path,
    space: str | None,
    tokens: TokenArray,
    salt: str,
    key_file: Path | None,
    public_prefixes: Path | None,
) -> int:
    from stemma.memory.tiers.block_store import ReadResult
    from stemma.memory.tiers.bundle import write_bundle
    from stemma.memory.tiers.disk.existing import find_space, open_existing, space_of
    from stemma.prefix.keys import Namespace
    from stemma.server.door.published import PublishedPrefixes

    found = find_space(directory, space)
    store = open_existing(found)
    assert found.manifest is not None
    key_space = space_of(found.manifest)
    published = PublishedPrefixes(public_prefixes, key_space.block_size)
    roots = key_space.roots(published.located(Namespace(salt=salt), tokens))
    buffer = memoryview(bytearray(store.block_bytes))

    def blocks() -> Iterator[memoryview]:
        for key in roots.chain(tokens):
            if store.get_many([key], [buffer])[0] is not ReadResult.HIT:
                return
            yield buffer

    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        count = write_bundle(
            file, key_space, roots, tokens, blocks(), block_bytes=store.block_bytes, key=read_secret(key_file)
        )
    store.close()
    if not count:
        raise StorageError("nothing of this prompt lies in the disk cache")
    return count


def _import_to_directory(
    path: Path, directory: Path, size_bytes: int | None, key_file: Path | None, trust_imports: bool
) -> int:
    from stemma.memory.tiers.block_store import BlockPut, PutResult
    from stemma.memory.tiers.bundle import BundleTrust, read_blocks, read_header
    from stemma.memory.tiers.disk.disk_store import DiskStore, size_for_blocks
    from stemma.memory.tiers.disk.existing import held_blocks
    from stemma.memory.tiers.disk.spaces import list_spaces, new_manifest
    from stemma.prefix.eviction.registry import make_policy

    with _open(path) as file:
        header = read_header(file, BundleTrust(read_secret(key_file), takes_unsigned=trust_imports))
        if size_bytes is None:
            manifest = new_manifest(header.space, header.block_bytes, 0)
            spaces = list_spaces(directory) if directory.exists() else []
            own = [held_blocks(one).num_blocks for one in spaces if one.path.name == manifest.digest]
            others = sum(one.allocated_bytes for one in spaces if one.path.name != manifest.digest)
            size_bytes = others + size_for_blocks(manifest, sum(own) + header.num_blocks)
        policy = make_policy("lru")
        store = DiskStore(directory, header.space, header.block_bytes, size_bytes, policy, time.time)
        keys = [header.roots.first, *header.keys]
        num_new = 0

        def take(position: int, key: Any, data: memoryview) -> None:
            nonlocal num_new
            parent = header.roots.before(position, keys[position])
            result = store.put_many([BlockPut(key, parent, data)])[0]
            if result not in (PutResult.STORED, PutResult.EXISTS):
                raise StorageError(f"the disk cache took {position} blocks, then: {result}")
            num_new += result is PutResult.STORED

        try:
            read_blocks(file, header, take)
        finally:
            store.close()
    return num_new


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}") from error


def _export_from_server(draft: Path, url: str, body: dict[str, Any], admin_key: str | None) -> int:
    with (
        answer(url, "POST", "/admin/cache/export", admin_key, json=body) as response,
        open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
    ):
        for chunk in response.iter_bytes():
            file.write(chunk)
        return int(response.headers["x-num-blocks"])


def _where(salt: str, tenant: str) -> dict[str, str]:
    """Return the fields of a request that name a namespace."""
    return {"cache_salt": salt, **({"tenant": tenant} if tenant else {})}


def _import_to_server(path: Path, url: str, where: dict[str, str], admin_key: str | None) -> int:
    headers = {"content-type": "application/octet-stream"}
    with _open(path) as file:
        options = {"params": where, "content": file, "headers": headers}
        return int(ask(url, "POST", "/admin/cache/import", admin_key, **options)["num_new_blocks"])
