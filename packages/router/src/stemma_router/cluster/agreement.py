"""Whether the servers behind one router serve the same: else the text of an answer depends on who gave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from stemma.told import ToldModel

_PARTS = {
    "model": "other weights: another checkpoint, revision or quantization",
    "kv": "another dtype, KV layout or kind of machine",
    "template": "another chat template",
    "block_size": "another block size",
}


def disagreements(told: Mapping[str, ToldModel | None]) -> Iterator[str]:
    """Yield a sentence for each thing that some servers tell otherwise than the most of them; by URL."""
    known = {url: one for url, one in told.items() if one is not None}
    for part, text in _PARTS.items():
        for urls, others in _apart({url: getattr(one, part) for url, one in known.items()}):
            yield f"{', '.join(urls)}: {text} than {', '.join(others)}"
    adapters = sorted((name, root, url) for url, one in known.items() for name, root in one.adapters)
    for _, same in groupby(adapters, key=lambda one: one[0]):
        for urls, others in _apart({url: root for _, root, url in same}):
            yield f"{', '.join(urls)}: an adapter of the same name has other weights than {', '.join(others)}"


def _apart(values: Mapping[str, object]) -> Iterable[tuple[list[str], list[str]]]:
    """Return groups of URLs whose value isn't that of the largest group, and the latter."""
    groups: dict[object, list[str]] = {}
    for url in sorted(values):
        groups.setdefault(values[url], []).append(url)
    most, *others = sorted(groups.values(), key=lambda urls: (-len(urls), urls)) or [[]]
    return [(urls, most) for urls in others]
