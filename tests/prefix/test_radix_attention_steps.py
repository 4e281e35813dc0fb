"""The nine steps of the RadixAttention figure (arXiv 2312.07104, figure 3), the tree after each.

One letter is one token and one block. Two things differ from the figure: a chain without a branch is one
node here, so turn b extends node a instead of hanging below it, and eviction takes just as many tokens off
the end of a node as are needed.
"""

from __future__ import annotations

from inspect import cleandoc

import numpy as np

from stemma.engine.core.tree_drawing import draw_tree
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.prefix.radix import RadixIndex


class Server:
    def __init__(self) -> None:
        self.index = RadixIndex(block_size=1)
        self.free = list(range(1000))
        self.now = 0.0

    def serve(self, text: str, evict: int = 0) -> int:
        """Serve a prompt together with its answer, after eviction for room; return the tokens reused."""
        self.now += 1.0
        tokens = np.array([ord(char) for char in text], dtype=np.int32)
        match = self.index.match(DEFAULT_NAMESPACE, tokens)
        self.index.touch(match.block_ids, self.now)
        self.index.pin(match.block_ids)
        assert len(self.index.evict(evict, self.now)) == evict
        new = np.array([self.free.pop() for _ in range(len(text) - match.num_tokens)], dtype=np.int32)
        self.index.insert(DEFAULT_NAMESPACE, tokens, np.concatenate((match.block_ids, new)), self.now)
        self.index.unpin(match.block_ids)
        self.index.check()
        return match.num_tokens

    def tree(self) -> str:
        drawing = draw_tree(self.index, lambda tokens: "".join(map(chr, tokens)), max_chars=99)
        return "\n".join(line.rsplit('" ')[0].replace('"', "") for line in drawing.splitlines()[1:])


def test_nine_steps() -> None:
    server = Server()
    system = "You are a helpful assistant."

    # 1. The tree is empty.
    assert list(server.index.nodes(DEFAULT_NAMESPACE)) == []

    # 2. A first chat: system prompt, "Hello!", "Hi!" become one node (a).
    first = system + "[Hello!|Hi!]"
    assert server.serve(first) == 0
    assert server.tree() == cleandoc("└── You are a helpful assistant.[Hello!|Hi!]")

    # 3. Its next turn (b) reuses all of a.
    first += "[Solve this|Sure]"
    assert server.serve(first) == len(system + "[Hello!|Hi!]")
    assert server.tree() == cleandoc("└── You are a helpful assistant.[Hello!|Hi!][Solve this|Sure]")

    # 4. A second chat shares the system prompt: the node is split (c: the first chat, d: the second).
    second = system + "[What is up?|Ask]"
    assert server.serve(second) == len(system + "[")
    assert server.tree() == cleandoc(
        """
        └── You are a helpful assistant.[
            ├── Hello!|Hi!][Solve this|Sure]
            └── What is up?|Ask]
        """
    )

    # 5. The second chat goes on; memory is short, so c goes (least recently used), d grows.
    second += "[Write a story|Once]"
    assert server.serve(second, evict=len("Hello!|Hi!][Solve this|Sure]")) == len(
        system + "[What is up?|Ask]"
    )
    assert server.tree() == cleandoc("└── You are a helpful assistant.[What is up?|Ask][Write a story|Once]")

    # 6. A few-shot query shares nothing: the root gets a second child (e).
    examples = "Q1 A1 Q2 A2|"
    assert server.serve(examples + "How? So.") == 0
    assert server.tree() == cleandoc(
        """
        ├── You are a helpful assistant.[What is up?|Ask][Write a story|Once]
        └── Q1 A1 Q2 A2|How? So.
        """
    )

    # 7. More queries with the same examples: e is split.
    assert server.serve(examples + "Why? Because.") == len(examples)
    assert server.serve(examples + "Can?_Yes.") == len(examples)
    assert server.tree() == cleandoc(
        """
        ├── You are a helpful assistant.[What is up?|Ask][Write a story|Once]
        └── Q1 A1 Q2 A2|
            ├── How? So.
            ├── Why? Because.
            └── Can?_Yes.
        """
    )

    # 8. The first chat sends a message: what only the second chat used goes (g, h); a new node (i).
    first = system + "[Hello!|Hi!]"
    assert server.serve(first, evict=len("What is up?|Ask][Write a story|Once]")) == len(system + "[")
    assert server.tree() == cleandoc(
        """
        ├── You are a helpful assistant.[Hello!|Hi!]
        └── Q1 A1 Q2 A2|
            ├── How? So.
            ├── Why? Because.
            └── Can?_Yes.
        """
    )

    # 9. More samples are drawn for the question at j ("Can?"), the first as before: i, k and l go.
    assert server.serve(examples + "Can?_Yes.") == len(examples + "Can?_Yes.")
    room = len("How? So.") + len("Why? Because.") + len("Hello!|Hi!]")
    assert server.serve(examples + "Can?_No.", evict=room) == len(examples + "Can?_")
    assert server.serve(examples + "Can?_Maybe.") == len(examples + "Can?_")
    assert server.tree() == cleandoc(
        """
        ├── You are a helpful assistant.[
        └── Q1 A1 Q2 A2|Can?_
            ├── Yes.
            ├── No.
            └── Maybe.
        """
    )
