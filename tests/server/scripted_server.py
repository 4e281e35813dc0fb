"""A process to send signals to: arguments are a tokenizer's directory, delay and drain timeout in seconds."""

from __future__ import annotations

import sys
from pathlib import Path

from stemma.config.settings import EngineSettings, ModelSettings, ServerSettings, Settings
from stemma.model.tokenizer import Tokenizer
from stemma.server.runtime import listen, serve
from tests.server.scripted_engine import Script, ScriptedEngine


def main() -> int:
    path, delay_s, drain_timeout_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    engine = ScriptedEngine(Tokenizer(path), script=Script(delay_s=delay_s))
    settings = Settings(
        engine=EngineSettings(model=ModelSettings(path=path)),
        server=ServerSettings(port=0, drain_timeout_s=drain_timeout_s),
    )
    listener = listen("127.0.0.1", 0)
    return serve(engine, settings, listener, lambda url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
