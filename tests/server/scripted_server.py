"""A process to send signals to.

Arguments: a tokenizer's directory, delay and drain timeout in seconds, and maybe more settings as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stemma.config.settings import EngineSettings, ModelSettings, ServerSettings, Settings
from stemma.model.tokenizer import Tokenizer
from stemma.server.runtime import serve
from stemma.server.transport.planes import listen, listen_planes
from tests.server.scripted_engine import Script, ScriptedEngine


def main() -> int:
    path, delay_s, drain_timeout_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    engine = ScriptedEngine(Tokenizer(path), script=Script(delay_s=delay_s))
    others = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    server = {"port": 0, "drain_timeout_s": drain_timeout_s, **others.pop("server", {})}
    settings = Settings(
        engine=EngineSettings(model=ModelSettings(path=path)),
        server=ServerSettings.model_validate(server),
        **others,
    )
    with listen_planes(settings, listen) as listeners:
        return serve(engine, settings, listeners, lambda url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
