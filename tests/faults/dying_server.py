"""``stemma serve`` with a fault: the step thread dies at the second step. Arguments as for `stemma`."""

from __future__ import annotations

from stemma.cli import main
from stemma.engine.core.engine import Engine

step, num_calls = Engine.step, 0


def dying_step(self: Engine) -> object:
    global num_calls
    num_calls += 1
    if num_calls == 2:
        raise SystemExit("out of luck")
    return step(self)


Engine.step = dying_step  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    main()
