"""From the step thread to the output thread: news of several steps as one delivery.

Each delivery costs the output thread and the event loop some time, however many tokens it has. Where the
model's threads fill all cores, a step waits for as long. So tokens of quick steps are held for a moment and
leave together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Lock

from stemma.engine.core.request import SequenceNews


class NewsQueue:
    """News in order, sequence by sequence; for one writer, which runs steps, and one reader.

    Held are tokens alone that a further pure decode step can follow within `interval_s` after the last
    delivery: never a sequence's first or last token, an error, or anything of a request with stop strings
    (they are found by the reader, and each step until then computes tokens in vain). A step that takes
    longer than the last one can't keep tokens for longer than `interval_s`: the reader then fetches them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval_s = 0.0
        """How long tokens may be held; 0: not at all. To be set before both sides begin."""
        self._clock = clock
        self._ready: SimpleQueue[list[SequenceNews] | None] = SimpleQueue()
        self._lock = Lock()
        self._held: list[SequenceNews] = []
        self._is_watched = False
        """Whether the reader looks for held news once `interval_s` is over. Both: guarded by `_lock`."""
        # The writer's own:
        self._new: list[SequenceNews] = []
        """News of the last step."""
        self._urgent: set[str] = set()
        """Requests with news among `_new` that can't wait."""
        self._emptied_at = clock()
        """When nothing was held last."""
        self._began_at: float | None = None
        """When the step under way began."""
        self._last_began_at: float | None = None
        """When the step before it began, if that was pure decode."""

    # The writer:

    def end_step(self, news: list[SequenceNews]) -> None:
        """Take what a step did. It leaves with the next step's beginning, at the earliest.

        What is left of the steps before it leaves now if this step never began to compute, and before an
        error: nothing that is delivered with an error reaches a client.
        """
        if self._began_at is None or any(one.error is not None for one in news):
            self.pass_on()
        self._began_at = None
        self._new = news
        if self.interval_s:
            self._urgent = {one.state.request.request_id for one in news if _is_urgent(one)}

    def begin_step(self, is_decode: bool) -> None:
        """A step begins to compute, outside Python: pass on what can't be held until the next one does.

        `is_decode`: it computes no prompt. Further calls before `end_step` do nothing.
        """
        if self._began_at is not None:
            return
        now = self._began_at = self._clock()
        last, self._last_began_at = self._last_began_at, now if is_decode else None
        step_s = None if last is None else now - last
        if is_decode and step_s is not None and now + step_s <= self._emptied_at + self.interval_s:
            self._pass_on_urgent()
        else:
            self.pass_on()

    def pass_on(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            news, self._held = self._held + self._new, []
            self._put(news)
        self._new = []

    def put(self, news: list[SequenceNews]) -> None:
        """Pass on news that came between two steps, and all before them."""
        self.pass_on()
        if news:
            self._ready.put(news)

    def num_held(self, request_id: str) -> int:
        """Return how many tokens of a request are held. Any thread."""
        with self._lock:
            return sum(len(one.token_ids) for one in self._held if one.state.request.request_id == request_id)

    def close(self) -> None:
        """Tell the reader that no more will come. Any thread."""
        self._ready.put(None)

    def _pass_on_urgent(self) -> None:
        with self._lock:
            held = self._held + self._new
            if self._is_watched:
                urgent = [one for one in held if one.state.request.request_id in self._urgent]
                self._held = [one for one in held if one.state.request.request_id not in self._urgent]
            else:
                urgent, self._held = held, []
            self._put(urgent)
        self._new = []

    def _put(self, news: Sequence[SequenceNews]) -> None:
        if news:
            self._ready.put(list(news))
        if not self._held:
            self._emptied_at = self._clock()

    # The reader:

    def get(self) -> list[SequenceNews] | None:
        """Return the next delivery, waiting for it; None at the end."""
        if self.interval_s:
            with self._lock:
                self._is_watched = True
            try:
                return self._ready.get(timeout=self.interval_s)
            except Empty:
                pass
            with self._lock:
                late, self._held = self._held, []
                self._is_watched = bool(late)
            if late:
                return late
        return self._ready.get()


def _is_urgent(news: SequenceNews) -> bool:
    """Whether these news are worth a delivery of their own."""
    if news.finish_reason is not None or news.error is not None or news.state.request.params.stop:
        return True
    return news.state.sequences[news.index].num_output <= len(news.token_ids)
