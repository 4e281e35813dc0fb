"""Who watches a turn, in this order. A new observer is a class in its own room and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stemma.engine.client import EngineClient
from stemma.server.history.answers import WrittenAnswers
from stemma.server.history.following import AnswerKeeper, Concluder
from stemma.server.history.preparing import TurnPreparer
from stemma.server.observe.collected import TurnObserver
from stemma.server.observe.explanations import PartingNote
from stemma.server.observe.instruments import Instruments
from stemma.server.observe.prompt_parts import PartsKeeper
from stemma.server.turn.build import Turn
from stemma.server.turn.kv_hints import HintsExecutor

Observe = Callable[[Turn], TurnObserver | None]
"""Makes what watches one turn; None: it has nothing to see there."""


def observers(
    engine: EngineClient, instruments: Instruments, written: WrittenAnswers | None, preparer: TurnPreparer
) -> Sequence[Observe]:
    """Return what makes each observer of a turn. `written`: None, exact history is off."""
    explanations, divergences = instruments.explanations, instruments.divergences
    recent = instruments.recent

    def keeper(turn: Turn) -> TurnObserver | None:
        history = turn.asked.prompt.history
        if written is None or history is None or turn.request.beam is not None:
            return None
        return AnswerKeeper(written, history, engine.eos_token_ids)

    return (
        lambda turn: instruments.watches.watch(turn.request, turn.api, turn.caller.x_request_id),
        lambda turn: PartingNote(
            explanations,
            divergences,
            turn.request,
            turn.caller.x_request_id,
            recent,
            turn.asked.prompt.parts,
        ),
        keeper,
        lambda turn: (
            None if (parts := turn.asked.prompt.parts) is None else PartsKeeper(recent, turn.request, parts)
        ),
        lambda turn: None if turn.judged is None else HintsExecutor(engine, turn.request, turn.judged),
        lambda turn: preparer.open(turn.request, turn.asked.next_turn),
        lambda turn: Concluder(engine, turn.request, turn.tools_called if turn.asked.reader else None),
        # The last: it waits until the row is committed.
        lambda turn: instruments.ledger.entry(turn.request, turn.api),
    )
