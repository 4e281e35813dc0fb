"""From files to reports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from stemma.cli.progress import StepCounter, open_progress
from stemma.errors import ConfigError
from stemma.model.load.located import located_path
from stemma.model.text.tokenizer import Tokenizer
from stemma_lab.lint.bodies import read_bodies
from stemma_lab.lint.prompts import Renderer
from stemma_lab.lint.report import LintReport, lint
from stemma_lab.lint.traces import is_trace, trace_report


class Reporter:
    """Lints files with one model's tokenizer and template."""

    def __init__(self, model: Path | None, template: Path | None, num_image_tokens: int) -> None:
        self._model = model
        self._template = template
        self._num_image_tokens = num_image_tokens

    def report(self, paths: Sequence[Path]) -> LintReport:
        """Return what the prompts of all files share, in their order, or the requests of one trace."""
        if any(map(is_trace, paths)):
            if len(paths) > 1:
                raise ConfigError("a trace is linted by itself: its hashes can't be compared with prompts")
            return trace_report(paths[0])
        with open_progress("prompts") as progress:
            counter = StepCounter(progress, "prompts", None)
            bodies = (body for path in paths for body in read_bodies(path))
            return lint(bodies, self._renderer, counter.advance)

    @cached_property
    def _renderer(self) -> Renderer:
        """Read once, and only if a file holds text."""
        if self._model is None:
            raise ConfigError("name a model (--model): its tokenizer and template make the tokens")
        tokenizer = Tokenizer(located_path(self._model), chat_template=self._template)
        return Renderer(tokenizer, self._num_image_tokens)
