"""Sessions of an agent before a scripted server: what it did to the file, what it sent, what was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.agents import plan
from tests.conformance.agents.agents import Agent, Place, Ran, run
from tests.conformance.agents.serving import Computed, Exchange, ScriptedServer

FILE = "ledger.txt"
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Session:
    """One run of an agent."""

    ran: Ran
    file: str
    """Its content afterwards."""
    exchanges: Sequence[Exchange]
    computed: Sequence[Computed]
    """Of the requests that ask for an answer with the whole context: the long ones."""

    @property
    def refused(self) -> list[Exchange]:
        """What was answered with 4xx or 5xx, but for paths that are no API of ours."""
        return [one for one in self.exchanges if one.status >= 400]


def hold(name: str, agent: Agent, server: ScriptedServer, root: Path, opening: str = "") -> Session:
    """Let the agent do the task from the start, in the folder and home that it had before.

    `opening`: words before the task.
    """
    home, work = root / "home", root / "work"
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    (work / FILE).write_text(plan.BEFORE)
    place = Place(home, work, server.url, server.served_name)
    dialect = agent.dialect or name
    path = FILE if agent.says_turns else str(work / FILE)
    prompts = [opening + plan.task(dialect, path), *["Go on."] * (plan.NUM_STEPS - 1)]
    server.exchanges(), server.computed()
    ran = run(agent, place, prompts, TIMEOUT_S)
    return Session(ran, (work / FILE).read_text(), server.exchanges(), server.computed())


def turns(computed: Sequence[Computed]) -> list[Computed]:
    """Return the requests of the task itself: side requests (titles) are far shorter."""
    longest = max((one.num_prompt for one in computed), default=0)
    return [one for one in computed if one.num_prompt > longest / 2]
