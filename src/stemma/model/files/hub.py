"""A model by its name on the Hugging Face hub: ``org/repo``, or ``org/repo:file.gguf``.

What the hub's cache on this machine holds is served without asking the hub. Everything else is downloaded
by `huggingface_hub`, which honours ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` and
draws the progress bars. Only files that loading reads are taken: no ``.bin`` weights, no second copy of the
weights in another format, and Python code only where it may run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from stemma.config.sizes import format_size
from stemma.errors import ModelError
from stemma.model.files.directory import CONFIG, GGUF_SUFFIX, INDEX, SINGLE, check_directory, weight_files
from stemma.model.files.gguf_parts import part_files, part_names

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

_SPARE_BYTES = 256 * 2**20
"""Space on the disk that a download leaves free."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.jinja", *_TOKENIZERS)
"""Files of a checkpoint that loading may read, beside its weights; none in folders below."""
_MAX_LISTED = 6
_REPO = re.compile(r"(?=.{1,96}\Z)(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Names that the hub allows."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub."""

    repo: str
    """``org/repo``."""
    file: str | None = None
    """A GGUF file of it, or one of several parts; None: the checkpoint in safetensors."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""

    @property
    def shown(self) -> str:
        """As the user writes it."""
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


def hub_name(path: Path, revision: str | None = None) -> HubName | None:
    """Return the name that `path` is, None if it is none: it exists here, or isn't written like one."""
    repo, _, file = str(path).partition(":")
    if path.exists() or path.is_absolute() or repo.count("/") != 1 or repo.startswith((".", "~")):
        return None
    if file and (not file.lower().endswith(GGUF_SUFFIX) or ".." in Path(file).parts or file.startswith("/")):
        return None
    if not file and path.suffix.lower() == GGUF_SUFFIX:
        return None  # a file that isn't there
    return HubName(repo, file or None, revision) if _REPO.fullmatch(repo) else None


def cached_model(name: HubName) -> Path | None:
    """Return where the hub's cache on this machine holds the whole model, None if it doesn't. Asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    # Not snapshot_download: it takes a snapshot for incomplete that lacks files which loading doesn't read.
    found = try_to_load_from_cache(name.repo, name.file or CONFIG, revision=name.revision)
    if not isinstance(found, str):
        return None
    if name.file is not None:
        return Path(found) if _is_complete(Path(found)) else None
    return Path(found).parent if _is_whole(Path(found).parent) else None


def _is_complete(file: Path) -> bool:
    """Whether the other parts of a GGUF file are beside it, if it is one of several."""
    try:
        part_files(file)
    except ModelError:
        return False
    return True


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has config, all weights and a tokenizer: other programs fetch some files only."""
    try:
        check_directory(folder)
        weight_files(folder)
    except ModelError:
        return False
    return any(True for pattern in _TOKENIZERS for _ in folder.glob(pattern))


def download(name: HubName, *, with_code: bool = False) -> Path:
    """Fetch a model into the hub's cache and return its directory, or its GGUF file.

    `with_code`: Python files too, for `trust_remote_code`. Raises ModelError, saying what to do: no such
    model, no access, nothing there that can be served, too little space, no connection.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    with _as_model_error(name):
        files = _chosen(name, [name.file] if name.file is not None else _listed(name), with_code)
        missing = [_dry_run(name, file) for file in files]
        _check_space(name, [info for info in missing if info.will_download])
        if name.file is not None:
            parts = {file: hf_hub_download(name.repo, file, revision=name.revision) for file in files}
            return Path(parts[name.file])
        return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=_literal(files)))


def _listed(name: HubName) -> list[str]:
    """Return the names of the repository's files."""
    from huggingface_hub import HfApi

    return [each.rfilename for each in HfApi().model_info(name.repo, revision=name.revision).siblings or ()]


def _chosen(name: HubName, files: Sequence[str], with_code: bool) -> list[str]:
    """Return those of `files` that loading reads. Raises ModelError if there are no weights to serve."""
    if name.file is not None:
        folder = PurePosixPath(name.file).parent
        return [str(folder / part) for part in part_names(PurePosixPath(name.file).name)]
    weights = [file for file in files if "/" not in file and file.endswith(".safetensors")]
    described = SINGLE in weights or INDEX in files
    if described:
        weights = [file for file in weights if file == SINGLE or file.startswith("model-")] or weights
    if not weights or CONFIG not in files:
        raise ModelError(_nothing_to_serve(name, files))
    patterns = (*_BESIDE_WEIGHTS, "*.py") if with_code else _BESIDE_WEIGHTS
    beside = [file for file in files if "/" not in file and any(fnmatch(file, one) for one in patterns)]
    return sorted({*beside, *weights})


def _nothing_to_serve(name: HubName, files: Sequence[str]) -> str:
    if found := sorted(file for file in files if file.lower().endswith(GGUF_SUFFIX)):
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        shown = ", ".join(found[:_MAX_LISTED]) + more
        return f"{name.repo} holds GGUF files; name one, as {name.repo}:{found[0]} (there are {shown})"
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return (
            f"{name.repo} has weights as .bin or .pt files only, which can run code when they are read; look "
            "for another repository or revision of the model with safetensors"
        )
    return f"{name.repo} has no {CONFIG} with safetensors beside it; is it a language model?"


def _dry_run(name: HubName, file: str) -> DryRunFileInfo:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(name.repo, file, revision=name.revision, dry_run=True)


def _check_space(name: HubName, files: Iterable[DryRunFileInfo]) -> None:
    """Raise ModelError unless the disk of the hub's cache has room for `files`."""
    from huggingface_hub.constants import HF_HUB_CACHE

    num_bytes = sum(info.file_size or 0 for info in files)
    folder = Path(HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes and num_bytes + _SPARE_BYTES > free_bytes:
        raise ModelError(
            f"{name.shown} needs {format_size(num_bytes)} and {folder} has {format_size(free_bytes)} free; "
            "free some, or set HF_HOME to a directory on another disk"
        )


def _literal(files: Iterable[str]) -> list[str]:
    """Return patterns that match these names alone."""
    return [file.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]") for file in files]


@contextmanager
def _as_model_error(name: HubName) -> Iterator[None]:
    """Turn the hub's errors into one line that says what to do."""
    from huggingface_hub import constants, errors

    where = f"revision {name.revision} of {name.repo}" if name.revision else name.repo
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name.repo} asks for consent: accept its terms on its page, then log in (hf auth login, or "
            "HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no directory {name.repo} here, and {constants.ENDPOINT} has no model {name.repo} that you may "
            "see; check the name, or log in (hf auth login, or HF_TOKEN)"
        ) from error
    except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise ModelError(f"{constants.ENDPOINT} has no {name.file or where} in {where}") from error
    except errors.OfflineModeIsEnabled as error:
        raise ModelError(
            f"no directory {name.shown} here, the hub's cache doesn't hold the whole model, and "
            "HF_HUB_OFFLINE is set; unset it, or give the path of a checkpoint"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, RuntimeError) as error:
        raise ModelError(_unreached(name, error)) from error
    except Exception as error:  # httpx2's, which huggingface_hub lets through
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise ModelError(_unreached(name, error)) from error


def _unreached(name: HubName, error: Exception) -> str:
    from huggingface_hub.constants import ENDPOINT

    first_line = (str(error).splitlines() or [""])[0][:200]
    return (
        f"no directory {name.shown} here, and {ENDPOINT} can't give it ({type(error).__name__}: "
        f"{first_line}); give the path of a checkpoint, or set HF_ENDPOINT to a mirror"
    )
