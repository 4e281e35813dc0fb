"""Real agents edit a file in ten turns; each turn, the next session and a restarted server compute little.

`make agents` installs them and runs this. ``AGENTS_TABLE=FILE`` appends a row for docs/how-to/agents.md;
``AGENTS_RECORD=1`` writes tests/recordings anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conformance.agents import plan, recordings
from tests.conformance.agents.agents import AGENTS, Agent
from tests.conformance.agents.serving import Computed, ScriptedServer
from tests.conformance.agents.sessions import Session, hold, turns
from tests.conformance.agents.tiny import write_model

SLACK = 64
"""Tokens that a turn may compute beside its own text."""
FLAGS = ("--kv-cache-memory", "200MB", "--disk-cache-size", "500MB", "--load-when", "always")


TEMPLATE, STRICT_TEMPLATE = "qwen3", "qwen3.5"
"""The second takes a system message first alone, and calls in another format."""


def model_of(template: str, directory: pytest.TempPathFactory) -> Path:
    """Return the model with a template, written once."""
    path = directory.getbasetemp() / template / "tiny"
    return path if path.exists() else write_model(path, template)


def check(session: Session, agent: Agent) -> list[Computed]:
    """Hold one session against what is promised; return its ten turns."""
    assert session.ran.code == 0, session.ran.output[-2000:]
    assert session.refused == []
    assert session.file == plan.AFTER
    held = turns(session.computed)
    assert len(held) == plan.NUM_STEPS
    for before, turn in pairwise(held):
        new = turn.num_prompt - before.num_prompt - before.num_generated
        assert turn.num_computed <= new + agent.num_moved + SLACK, (before, turn)
    return held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "template"),
    [*((name, TEMPLATE) for name in AGENTS), ("claude-code", STRICT_TEMPLATE), ("codex", STRICT_TEMPLATE)],
)
def test_agent(name: str, template: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    agent = AGENTS[name]
    if not agent.is_installed():
        pytest.skip("not installed: make agents")
    model = model_of(template, tmp_path_factory)
    flags = (*FLAGS, "--disk-cache", str(tmp_path / "disk"))
    with ScriptedServer(model, tmp_path, flags, agent.serves) as server:
        sessions = [hold(name, agent, server, tmp_path), hold(name, agent, server, tmp_path, "Once more. ")]
        server.kill()
        server.start()
        sessions.append(hold(name, agent, server, tmp_path, "Again. "))
    held = [check(session, agent) for session in sessions]
    if template == TEMPLATE:
        note(name, agent, sessions, held)
    for _, (first, *_rest) in zip(sessions[1:], held[1:], strict=True):
        assert first.num_cached >= agent.shared * first.num_prompt
    assert held[2][0].num_from_disk >= agent.shared * held[2][0].num_prompt - SLACK


def note(name: str, agent: Agent, sessions: Sequence[Session], held: Sequence[Sequence[Computed]]) -> None:
    """Write what was measured, and what was sent, where that is asked for."""
    if table := os.environ.get("AGENTS_TABLE"):
        with Path(table).open("a") as file:
            file.write(row(name, agent, sessions, held) + "\n")
    if os.environ.get("AGENTS_RECORD"):
        recordings.write(name, agent.version(), [session.exchanges for session in sessions[:2]])


def row(name: str, agent: Agent, sessions: Sequence[Session], held: Sequence[Sequence[Computed]]) -> str:
    """Return a row of the table in docs/how-to/agents.md."""
    num_refused = sum(len(session.refused) for session in sessions)
    places = [held[0][0], held[0][1], held[0][4], held[0][9], held[1][0], held[2][0]]
    cells = [f"{one.num_computed:,} of {one.num_prompt:,}" for one in places]
    num = sum(len(session.exchanges) for session in sessions)
    return "| " + " | ".join([name, agent.version(), str(num), str(num_refused), *cells]) + " |"
