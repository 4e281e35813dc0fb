import numpy as np

from stemma.engine.core.tree_drawing import draw_tree
from stemma.prefix.hashed import HashIndex
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import TokenArray


def encode(text: str) -> TokenArray:
    return np.array([ord(char) for char in text], dtype=np.int32)


def decode(tokens: TokenArray) -> str:
    return "".join(chr(token) for token in tokens)


def test_empty() -> None:
    assert draw_tree(RadixIndex(4), decode) == "(empty)"


def test_tree() -> None:
    index = RadixIndex(4)
    for namespace, text, ids in (
        (DEFAULT_NAMESPACE, "abcdefgh", [0, 1]),
        (DEFAULT_NAMESPACE, "abcdefXY", [0, 2]),
        (DEFAULT_NAMESPACE, "abcdefX\nzz", [0, 6, 7]),
        (DEFAULT_NAMESPACE, "wx", [3]),
        (Namespace(salt="me", adapter="sql"), "y" * 300, list(range(10, 85))),
    ):
        index.insert(namespace, encode(text), np.array(ids, dtype=np.int32), 0.0)
    index.pin(np.array([0], dtype=np.int32))
    index.pin(np.array([0, 2], dtype=np.int32))
    assert draw_tree(index, decode, max_chars=9).splitlines() == [
        "default namespace",
        '├── "abcdef" 6 tokens, 1 block, pinned 2 times',
        '│   ├── "gh" 2 tokens, 1 block',
        '│   └── "X" 1 token, 0 blocks',
        '│       ├── "Y" 1 token, 1 block, pinned',
        '│       └── "\\nzz" 3 tokens, 2 blocks',
        '└── "wx" 2 tokens, 1 block',
        "namespace salt 'me', adapter 'sql'",
        '└── "yyyyy…yyy" 300 tokens, 75 blocks',
    ]


def test_a_hash_index_is_drawn_as_a_tree() -> None:
    tree, hashed = RadixIndex(4), HashIndex(KeySpace("model", "layout", 4))
    for index in (tree, hashed):
        for text, ids in (("abcdefgh", [0, 1]), ("abcdwxyz", [0, 2]), ("no", [3])):
            index.insert(DEFAULT_NAMESPACE, encode(text), np.array(ids, dtype=np.int32), 0.0)
    assert sorted(draw_tree(hashed, decode).splitlines()) == sorted(draw_tree(tree, decode).splitlines())
    assert "4 tokens, 1 block" in draw_tree(hashed, decode)
