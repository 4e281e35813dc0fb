"""Which model a request names: the one that is served, or one of its adapters."""

from __future__ import annotations

from stemma.errors import InvalidRequest, UnknownModel
from stemma.model.lora.adapter import Adapter
from stemma.server.context import ServerContext

_NO_MODEL = ("", "dummy", "tgi")
"""The model name that huggingface_hub sends to a server given by URL."""
_MAX_SHOWN = 256


def served_names(context: ServerContext) -> tuple[str, ...]:
    """Return the names of the model itself; answers give the first."""
    return (context.engine.model_name, *context.engine.also_named)


def check_model(context: ServerContext, name: str | None) -> Adapter | None:
    """Return the adapter called `name`; None: the model itself, or the client names none.

    Raises UnknownModel.
    """
    served = served_names(context)
    if name is None or name in (*served, *_NO_MODEL):
        return None
    adapter = context.engine.adapters.find(name)
    if adapter is None:
        beside = " and adapters" if context.engine.adapters.all() else ""
        raise UnknownModel(
            f"the model {name[:_MAX_SHOWN]!r} does not exist; this server serves {served[0]!r}{beside}",
            param="model",
        )
    return adapter


def chosen_adapter(context: ServerContext, model: str | None, adapter_id: str | None) -> Adapter | None:
    """Return the adapter that a request in TGI's shape names: by ``model``, or ``parameters.adapter_id``.

    Raises UnknownModel, and InvalidRequest if the two name different adapters.
    """
    by_model = check_model(context, model)
    if adapter_id is None:
        return by_model
    adapter = context.engine.adapters.find(adapter_id)
    if adapter is None:
        raise UnknownModel(f"no adapter is loaded as {adapter_id!r}", param="parameters.adapter_id")
    if by_model is not None and by_model is not adapter:
        raise InvalidRequest("model and adapter_id name different adapters", param="parameters.adapter_id")
    return adapter


def answered_by(context: ServerContext, name: str | None) -> str:
    """Return the name that an answer gives as its model: the adapter's, or that of the model itself."""
    if name is not None and context.engine.adapters.find(name) is not None:
        return name
    return context.engine.model_name
