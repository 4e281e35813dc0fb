"""Files that lie: what a start does with them, within little memory and time."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stemma.config.settings import ModelSettings
from stemma.errors import StemmaError
from stemma.model.files.fingerprint import model_fingerprint
from stemma.model.load.loading import load_model
from stemma.model.text.tokenizer import Tokenizer

SPARE_BYTES = 2 << 30
"""More than a tiny model takes, threads' stacks and heaps included."""
HANG_S = 60
LONGEST = 1500
"""Characters of an error beside the path."""


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process get `SPARE_BYTES` more, and no more; raise AssertionError if it hangs."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it takes too long")

    handler = signal.signal(signal.SIGALRM, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def _use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(path)
    tokenizer.decode(tokenizer.encode("What is 2 + 2? Grüße <|im_end|>").tolist())
    found = tokenizer.eos_token_ids, tokenizer.special_token_ids, tokenizer.special_token_texts
    assert all(isinstance(each, int) for each in (*found[0], *found[1]))
    assert isinstance(tokenizer.vocab_size, int)
    assert tokenizer.special_tokens is not None
    assert tokenizer.template_variables is not None
    assert tokenizer.token_bytes is None or tokenizer.token_bytes[0] is not None
    if tokenizer.has_chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


USES: dict[str, Callable[[Path], object]] = {
    "load": lambda path: load_model(ModelSettings(path=path, dtype="float32", device="cpu")),
    "tokenizer": _use_tokenizer,
    "fingerprint": model_fingerprint,
}
"""All that a start and a first request do with a checkpoint."""


def refusals(path: Path, uses: tuple[str, ...] = tuple(USES)) -> list[StemmaError]:
    """Use a checkpoint, and return what was refused; nothing else may be raised."""
    refused = []
    with little_memory():
        for use in uses:
            try:
                USES[use](path)
            except StemmaError as error:
                refused.append(error)
    for one in refused:
        assert len(str(one)) < LONGEST + len(str(path)), str(one)[:3000]
    return refused
