"""Draw an index as a tree of text: what `stemma demo` and the cache endpoint show.

default namespace
├── "You are a helpful assistant. " 29 tokens, 1 block
│   ├── "Hello! Hi!" 10 tokens, 2 blocks
│   └── "Write a story." 14 tokens, 1 block, pinned
└── "Question 1: ..." 120 tokens, 8 blocks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from stemma.prefix.headed import HeadedIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import Namespace
from stemma.prefix.radix import NodeView, RadixIndex
from stemma.terminal_text import visible
from stemma.types import TokenArray

Decode = Callable[[TokenArray], str]
"""Turns token ids into text."""

_MAX_CHARS = 48
_EDGE_TOKENS = 64


def draw_tree(index: PrefixIndex, decode: Decode, max_chars: int = _MAX_CHARS) -> str:
    """Return a drawing of the whole index, one line a node; at most `max_chars` of each node's text."""
    inner = index.inner if isinstance(index, HeadedIndex) else index
    tree = inner if isinstance(inner, RadixIndex) else _as_radix(inner)
    lines: list[str] = []
    for namespace in tree.namespaces():
        lines.append(_title(namespace))
        views = list(tree.nodes(namespace))
        for view, branches in zip(views, _branches(views), strict=True):
            lines.append(branches + _label(view, decode, max_chars))
    return "\n".join(lines) if lines else "(empty)"


def _as_radix(index: PrefixIndex) -> RadixIndex:
    """Return a radix tree of the same sequences."""
    tree = RadixIndex(index.block_size)
    for namespace, tokens, block_ids in index.walk():
        tree.insert(namespace, tokens, block_ids, now=0.0)
    return tree


def _title(namespace: Namespace) -> str:
    parts = [f"{name} {value!r}" for name in ("salt", "adapter") if (value := getattr(namespace, name))]
    title = f"namespace {', '.join(parts)}" if parts else "default namespace"
    if namespace.is_public:
        return f"published prefixes{', '.join(['', *parts])}"
    if namespace.head is not None:
        title += f", behind {namespace.head.num_tokens} published tokens ({namespace.head.digest.hex()[:8]})"
    return title


def _branches(views: list[NodeView]) -> Iterator[str]:
    """Yield the line art before each node (parents first, as `RadixIndex.nodes` gives them)."""
    arts: list[str] = []
    open_depths: set[int] = set()
    # Backwards: a depth is open while a later sibling is still to hang on it.
    for view in reversed(views):
        open_depths = {depth for depth in open_depths if depth <= view.depth}
        art = "".join("│   " if depth in open_depths else "    " for depth in range(view.depth))
        arts.append(art + ("├── " if view.depth in open_depths else "└── "))
        open_depths.add(view.depth)
    return reversed(arts)


def _label(view: NodeView, decode: Decode, max_chars: int) -> str:
    counts = [_count(len(view.tokens), "token"), _count(len(view.block_ids), "block")]
    if view.num_pins:
        counts.append("pinned" if view.num_pins == 1 else f"pinned {view.num_pins} times")
    return f"{_shorten(view.tokens, decode, max_chars)} {', '.join(counts)}"


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def _shorten(tokens: TokenArray, decode: Decode, max_chars: int) -> str:
    """Return the text of `tokens` in quotes, its middle left out if it is long."""
    text = decode(tokens if len(tokens) <= 2 * _EDGE_TOKENS else tokens[:_EDGE_TOKENS])
    if len(tokens) > 2 * _EDGE_TOKENS:
        text += "…" + decode(tokens[-_EDGE_TOKENS:])
    if len(text) > max_chars:
        head = (max_chars - 1) * 2 // 3
        text = text[:head] + "…" + text[len(text) - (max_chars - 1 - head) :]
    return visible(json.dumps(text, ensure_ascii=False))
