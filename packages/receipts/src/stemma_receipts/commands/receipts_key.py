"""`stemma receipts-key`: a key that signs receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stemma_receipts.keys import key_id, make_key, read_public_key


def command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file; FILE.pub: its public key.")],
) -> None:
    """Make a key that signs receipts, and its public key."""
    public = make_key(path)
    typer.echo(f"{path} signs (stemma serve --receipts {path}); {public} is for those who check.")
    typer.echo(f"keyid {key_id(read_public_key(public))}")
