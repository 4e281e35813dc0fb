"""Whether the model that was named can be served here, by its config and its headers."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.config.settings import EngineSettings
from stemma.errors import StemmaError


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A checkpoint, or why there is none."""

    name: str
    """As it was given."""
    architecture: str | None = None
    max_model_len: int | None = None
    weight_bytes: int | None = None
    """As they are stored."""
    problems: tuple[str, ...] = ()


def examine_model(settings: EngineSettings) -> NamedModel:
    """Read a checkpoint's config and headers; nothing is downloaded."""
    from stemma.engine.preflight import check_checkpoint, remarks
    from stemma.model.files.directory import stored_tensors
    from stemma.model.load.located import present_path
    from stemma.model.opened.checkpoint_config import describe_checkpoint

    name = str(settings.model.path)
    path = present_path(settings.model)
    if path is None:
        return NamedModel(name, problems=("it isn't on this machine; `stemma serve` fetches it",))
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})
    try:
        described = describe_checkpoint(settings.model)
        num_bytes = sum(tensor.num_bytes for tensor in stored_tensors(path))
        check_checkpoint(settings)
    except StemmaError as error:
        return NamedModel(name, problems=(str(error),))
    classes = described.config.architectures or [described.config.model_type]
    problems = tuple(remarks(settings))
    return NamedModel(name, str(classes[0]), described.max_model_len, num_bytes, problems)
