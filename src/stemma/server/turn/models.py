"""Which model a request names: the one that is served, or one of its adapters."""

from __future__ import annotations

from stemma.engine.client import EngineClient
from stemma.errors import InvalidRequest, UnknownModel
from stemma.model.lora.adapter import Adapter

_NO_MODEL = ("", "dummy", "tgi")
"""The model name that huggingface_hub sends to a server given by URL."""
_MAX_SHOWN = 256


def served_names(engine: EngineClient) -> tuple[str, ...]:
    """Return the names of the model itself; answers give the first."""
    return (engine.model_name, *engine.also_named)


def check_model(engine: EngineClient, name: str | None) -> Adapter | None:
    """Return the adapter called `name`; None: the model itself, or the client names none.

    Raises UnknownModel.
    """
    served = served_names(engine)
    if name is None or name in (*served, *_NO_MODEL):
        return None
    adapter = engine.adapters.find(name)
    if adapter is None:
        beside = " and adapters" if engine.adapters.all() else ""
        raise UnknownModel(
            f"the model {name[:_MAX_SHOWN]!r} does not exist; this server serves {served[0]!r}{beside}",
            param="model",
        )
    return adapter


def chosen_adapter(engine: EngineClient, model: str | None, adapter_id: str | None) -> Adapter | None:
    """Return the adapter that a request in TGI's shape names: by ``model``, or ``parameters.adapter_id``.

    Raises UnknownModel, and InvalidRequest if the two name different adapters.
    """
    by_model = check_model(engine, model)
    if adapter_id is None:
        return by_model
    adapter = engine.adapters.find(adapter_id)
    if adapter is None:
        raise UnknownModel(f"no adapter is loaded as {adapter_id!r}", param="parameters.adapter_id")
    if by_model is not None and by_model is not adapter:
        raise InvalidRequest("model and adapter_id name different adapters", param="parameters.adapter_id")
    return adapter


def answered_by(engine: EngineClient, adapter: Adapter | None) -> str:
    """Return the name that an answer gives as its model: the adapter's, or that of the model itself."""
    return engine.model_name if adapter is None else adapter.name
