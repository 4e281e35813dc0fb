"""``stemma`` with a double of the model's choices. Arguments as for `stemma`.

The engine computes every prompt; only the tokens that it draws are those of `plan.answer`. Where a grammar
rules an answer, the script keeps out. Each exchange over HTTP is a line of the file that ``EXCHANGES`` names.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stemma.cli import main
from stemma.engine.core import engine
from stemma.engine.sampling.constraints import Constraints
from stemma.engine.sampling.state import SamplingState
from stemma.model.text.tokenizer import Tokenizer
from stemma.server import runtime
from stemma.server.app import create_app
from tests.conformance.agents.plan import answer, as_elements, as_json

EXCHANGES = "AGENT_EXCHANGES"
_MODEL = Path(sys.argv[2]) if __name__ == "__main__" else Path()


class ScriptedConstraints(Constraints):
    """Allow the script's next token alone."""

    def __init__(self, state: SamplingState, vocab_size: int, reply: Sequence[int]) -> None:
        super().__init__(replace(state.params, logit_bias=()), vocab_size, None)
        self._vocab_size, self._reply, self._num_drawn = vocab_size, reply, 0

    def append(self, token_id: int) -> None:
        self._num_drawn += 1

    def num_valid(self, draft: Sequence[int]) -> int:
        rest = self._reply[self._num_drawn :]
        differs = [ours != theirs for ours, theirs in zip(rest, draft, strict=False)]
        return differs.index(True) if True in differs else min(len(rest), len(draft))

    def _allowed(self, ahead: Sequence[int]) -> Any:
        place = min(self._num_drawn + len(ahead), len(self._reply) - 1)
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[self._reply[place]] = True
        return allowed


class ScriptedState(SamplingState):
    """Draws what the script answers to the prompt."""

    def __init__(self, params: Any, prompt_token_ids: Any, vocab_size: int, **others: Any) -> None:
        super().__init__(params, prompt_token_ids, vocab_size, **others)
        if self.constraints is None or not self.constraints.has_grammar:
            reply = reply_to(prompt_token_ids.tolist())
            self.constraints = ScriptedConstraints(self, vocab_size, reply)
            self.takes_likeliest = False


def reply_to(prompt: list[int]) -> list[int]:
    """Return the tokens that follow a prompt."""
    tokenizer = _tokenizer()
    write_call = as_elements if "<function=" in (tokenizer.chat_template or "") else as_json
    text = answer(tokenizer.decode(prompt, skip_special_tokens=False), write_call)
    return [*tokenizer.encode(text, add_special_tokens=False).tolist(), tokenizer.eos_token_ids[0]]


def _tokenizer() -> Tokenizer:
    global _loaded
    if _loaded is None:
        _loaded = Tokenizer(_MODEL)
    return _loaded


_loaded: Tokenizer | None = None


class Exchanges:
    """Writes what came in, and how it was answered."""

    def __init__(self, app: ASGIApp, file: Path) -> None:
        self._app, self._file = app, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/admin"):
            await self._app(scope, receive, send)
            return
        body, answered, told = bytearray(), bytearray(), {}

        async def heard() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
                told["answer_headers"] = [[k.decode(), v.decode()] for k, v in message["headers"]]
            answered.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, heard, said)
        finally:
            line = {
                "method": scope["method"],
                "path": scope["path"],
                "query": scope["query_string"].decode(),
                "headers": [[k.decode(), v.decode("latin-1")] for k, v in scope["headers"]],
                "body": base64.b64encode(bytes(body)).decode(),
                "answer": base64.b64encode(bytes(answered)).decode(),
                **told,
            }
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def record(file: Path) -> None:
    """Have the server write its exchanges."""

    def recorded(*arguments: Any, **named: Any) -> Any:
        app = create_app(*arguments, **named)
        app.add_middleware(Exchanges, file=file)
        return app

    runtime.create_app = recorded  # type: ignore[attr-defined]


if __name__ == "__main__":
    engine.SamplingState = ScriptedState  # type: ignore[attr-defined]
    if EXCHANGES in os.environ:
        record(Path(os.environ[EXCHANGES]))
    main()
