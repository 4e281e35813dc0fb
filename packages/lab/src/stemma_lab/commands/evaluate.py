"""``stemma eval MODEL``: perplexity of a text and accuracy on MMLU, each computed anew and from the cache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console

from stemma.cli.options import with_settings_flags
from stemma.cli.progress import CommandProgress, StepCounter, open_progress
from stemma.config.loading import load_settings
from stemma.config.settings import Settings
from stemma.errors import ConfigError
from stemma_lab.mmlu import CHOICES, Question, read_subject

if TYPE_CHECKING:
    from stemma_lab.evaluation import Evaluator, Perplexity

EXIT_DIFFERENT = 1
"""Exit status if an answer depends on the cache."""


@dataclass(slots=True)
class Accuracy:
    """Answers to the questions of one subject."""

    subject: str
    num_questions: int = 0
    num_right: int = 0
    num_right_cached: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    same_bits: bool = True


@with_settings_flags
def command(
    text: Annotated[Path | None, typer.Option(help="UTF-8 file whose perplexity is computed.")] = None,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens predicted from each other; less if the context is shorter.")
    ] = 1024,
    mmlu: Annotated[
        list[Path] | None, typer.Option(help="SUBJECT_test.csv of MMLU; may be given several times.")
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="Worked examples, from ../dev/SUBJECT_dev.csv.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="First N questions of each file.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The server's configuration file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> None:
    """Score a model: perplexity of a text, answers to MMLU's questions, computed anew and from the cache.

    Takes the flags of serve, so it says what --quantize or --kv-cache-dtype cost. Ends with 1 if an answer
    depends on what was cached.
    """
    console = Console(soft_wrap=True, highlight=False, stderr=as_json)
    if text is None and not mmlu:
        raise ConfigError("nothing to score: give --text FILE, --mmlu FILE or both")
    content = None if text is None else read_text(text)
    subjects = [(file.name, read_subject(file, shots)[:limit]) for file in mmlu or ()]
    settings = load_settings(file=config, environ=os.environ, flags=flags)
    with open_progress("loading the model") as progress:
        evaluator, num_tokens = _evaluator(settings, progress)
    perplexity = None
    if content is not None:
        with open_progress("reading the text"):
            perplexity = evaluator.perplexity(content, min(window, num_tokens))
        console.print(_perplexity_line(perplexity))
    accuracies = []
    for name, questions in subjects:
        with open_progress(f"answering {name}") as progress:
            counter = StepCounter(progress, f"answering {name}", len(questions))
            accuracies.append(_answer(evaluator, name, counter.over(questions)))
        console.print(_accuracy_line(accuracies[-1]))
    if len(accuracies) > 1:
        console.print(_accuracy_line(_sum(accuracies)))
    if as_json:
        found = {"perplexity": perplexity and asdict(perplexity), "mmlu": [asdict(a) for a in accuracies]}
        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    if not all(one.same_bits for one in accuracies) or (perplexity and not perplexity.same_bits):
        raise typer.Exit(EXIT_DIFFERENT)


def read_text(path: Path) -> str:
    """Return a file's text. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path} as UTF-8: {error}") from error


def _evaluator(settings: Settings, progress: CommandProgress) -> tuple[Evaluator, int]:
    """Load the model; return what asks it, and the tokens of its longest prompt."""
    from stemma.engine.build import build_engine
    from stemma_lab.evaluation import Evaluator

    # Steps here know one table of blocks; answers are the same bits whether windows are freed or not.
    cache = settings.engine.cache.model_copy(update={"free_windows": False})
    parts = build_engine(settings.engine.model_copy(update={"cache": cache}), progress)
    return Evaluator(parts), parts.engine.limits.max_tokens


def _answer(evaluator: Evaluator, name: str, questions: Iterable[Question]) -> Accuracy:
    """Ask each question twice: computed anew, and with what earlier ones left in the cache."""
    from stemma.prefix.keys import Namespace

    found = Accuracy(name.removesuffix("_test.csv"))
    namespace = Namespace(salt=f"mmlu {name}")
    answers = [f" {letter}" for letter in CHOICES]
    for question in questions:
        cached = evaluator.choose(question.prompt, answers, namespace, cached=True)
        cold = evaluator.choose(question.prompt, answers, namespace, cached=False)
        right = CHOICES.index(question.answer)
        found.num_questions += 1
        found.num_right += cold.index == right
        found.num_right_cached += cached.index == right
        found.num_prompt_tokens += cached.num_prompt_tokens
        found.num_cached_tokens += cached.num_cached_tokens
        found.same_bits &= bool((cold.logprobs == cached.logprobs).all())
    return found


def _sum(parts: Iterable[Accuracy]) -> Accuracy:
    total = Accuracy("all subjects")
    for one in parts:
        total.num_questions += one.num_questions
        total.num_right += one.num_right
        total.num_right_cached += one.num_right_cached
        total.num_prompt_tokens += one.num_prompt_tokens
        total.num_cached_tokens += one.num_cached_tokens
        total.same_bits &= one.same_bits
    return total


def _perplexity_line(found: Perplexity) -> str:
    return (
        f"perplexity {found.cold:.4f} over {found.num_tokens} tokens; with {found.num_cached_tokens} tokens "
        f"before them from the cache {found.warm:.4f}: {_verdict(found.same_bits)}"
    )


def _accuracy_line(found: Accuracy) -> str:
    num = max(1, found.num_questions)
    return (
        f"{found.subject}: {found.num_right} of {found.num_questions} right "
        f"({found.num_right / num:.1%}); with {found.num_cached_tokens} of {found.num_prompt_tokens} prompt "
        f"tokens from the cache {found.num_right_cached}: {_verdict(found.same_bits)}"
    )


def _verdict(same_bits: bool) -> str:
    return "[green]equal to the bit[/]" if same_bits else "[red]not equal[/]"
