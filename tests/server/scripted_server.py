"""The program of a server process with a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.runtime import serve
from stemma.server.transport.planes import listen, listen_planes
from tests.server.scripted_engine import Script, ScriptedEngine


def run(
    path: Path,
    delay_s: float,
    drain_timeout_s: float,
    others: dict[str, Any],
    tell_url: Callable[[str], None],
) -> int:
    """Serve until a signal; return the exit code. `path`: of a tokenizer; `others`: more settings."""
    engine = ScriptedEngine(Tokenizer(path), script=Script(delay_s=delay_s))
    asked = {"port": 0, "drain_timeout_s": drain_timeout_s, **others.get("server", {})}
    settings = Settings(
        engine=EngineSettings(model=ModelSettings(path=path)),
        server=ServerSettings.model_validate(asked),
        **{name: table for name, table in others.items() if name != "server"},
    )
    with listen_planes(settings, listen) as listeners:
        return serve(engine, settings, listeners, tell_url)
