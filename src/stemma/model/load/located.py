"""Where a model lies on this machine, whatever it was given as: a path, ``demo``, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from stemma.config.settings import ModelSettings
from stemma.model.files.directory import is_gguf
from stemma.model.files.hub import cached_model, download, hub_name
from stemma.model.load.demo import DEMO, converted_checkpoint, is_demo, resolve_checkpoint


def located_model(settings: ModelSettings) -> ModelSettings:
    """Return the settings with the path of a checkpoint of this machine, fetched first where it must be.

    A model of the hub keeps the name that it was asked for as its name in the API. Raises ModelError.
    """
    if is_demo(settings.path):
        return settings.model_copy(update={"path": resolve_checkpoint(settings.path)})
    name = hub_name(settings.path, settings.revision)
    if name is None:
        return settings
    path = cached_model(name) or download(name, with_code=settings.trust_remote_code)
    return settings.model_copy(update={"path": path, "served_name": settings.served_name or name.shown})


def located_path(path: Path) -> Path:
    """Return the path of a checkpoint that is here after this call. Raises ModelError."""
    return located_model(ModelSettings(path=path)).path


def is_here(settings: ModelSettings) -> bool:
    """Whether the model is on this machine, or made here from a package, so that nothing is downloaded."""
    if is_demo(settings.path):
        return True
    path = present_path(settings)
    return path is not None and (path.is_dir() or is_gguf(path))


def present_path(settings: ModelSettings) -> Path | None:
    """Return the checkpoint if it needs neither a download nor a conversion, else None. Asks nobody."""
    if is_demo(settings.path):
        return converted_checkpoint()
    name = hub_name(settings.path, settings.revision)
    return settings.path if name is None else cached_model(name)


def other_names(settings: ModelSettings) -> tuple[str, ...]:
    """Return what else a model is called: ``demo``, as it was given, where nobody named it otherwise."""
    return (str(DEMO),) if is_demo(settings.path) and settings.served_name is None else ()
