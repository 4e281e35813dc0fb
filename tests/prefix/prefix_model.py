"""What a prefix index with LRU should do, by brute force: every block is just the text it completes."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.prefix.keys import Namespace

Tokens = tuple[int, ...]


@dataclass
class ModelBlock:
    namespace: Namespace
    text: Tokens
    """All tokens from the start of the sequence to the end of this block."""
    stamp: int
    num_pins: int = 0


@dataclass
class ModelInserted:
    canonical: list[set[int]]
    """Per block, the ids that would do (a partial block may have several fuller ones)."""
    added: list[int]
    dropped: list[int]


class PrefixModel:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, ModelBlock] = {}
        self.clock = 0

    def depth(self, text: Tokens) -> int:
        return -(-len(text) // self.block_size)

    def match(self, namespace: Namespace, tokens: Tokens) -> int:
        longest = 0
        for block in self.blocks.values():
            if block.namespace == namespace:
                common = 0
                for left, right in zip(block.text, tokens, strict=False):
                    if left != right:
                        break
                    common += 1
                longest = max(longest, common)
        return longest

    def continuations(self, namespace: Namespace, head: Tokens, max_tokens: int) -> set[Tokens]:
        """How cached sequences that begin with `head` go on, to their ends or up to `max_tokens`."""
        tails = self.tails()
        return {
            block.text[len(head) : len(head) + max_tokens]
            for block_id, block in self.blocks.items()
            if block.namespace == namespace and block_id in tails and block.text[: len(head)] == head
        }

    def holders(self, namespace: Namespace, text: Tokens) -> set[int]:
        """Ids of blocks that hold the KV of the last tokens of `text`."""
        return {
            block_id
            for block_id, block in self.blocks.items()
            if block.namespace == namespace
            and self.depth(block.text) == self.depth(text)
            and block.text[: len(text)] == text
        }

    def insert(self, namespace: Namespace, tokens: Tokens, ids: list[int]) -> ModelInserted:
        result = ModelInserted([], [], [])
        new: list[int] = []
        for i, block_id in enumerate(ids):
            text = tokens[: (i + 1) * self.block_size]
            present = self.holders(namespace, text)
            if present:
                result.canonical.append(present)
                continue
            result.canonical.append({block_id})
            for old_id, old in list(self.blocks.items()):
                shorter = len(old.text) < len(text) and text[: len(old.text)] == old.text
                if shorter and old.namespace == namespace and self.depth(old.text) == i + 1:
                    del self.blocks[old_id]
                    if old_id != block_id:
                        result.dropped.append(old_id)
                        result.added.append(block_id)
                    break
            else:
                result.added.append(block_id)
            self.blocks[block_id] = ModelBlock(namespace, text, 0)
            new.append(block_id)
        self.touch(new)
        return result

    def touch(self, ids: list[int]) -> None:
        for block_id in reversed(ids):
            self.clock += 1
            self.blocks[block_id].stamp = self.clock

    def tails(self) -> set[int]:
        """Blocks without descendants."""
        parents = {
            (block.namespace, block.text[: (self.depth(block.text) - 1) * self.block_size])
            for block in self.blocks.values()
        }
        return {i for i, block in self.blocks.items() if (block.namespace, block.text) not in parents}

    def candidates(self) -> set[int]:
        return {i for i in self.tails() if not self.blocks[i].num_pins}

    def evict(self, num_blocks: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < num_blocks and (candidates := self.candidates()):
            victim = min(candidates, key=lambda i: self.blocks[i].stamp)
            del self.blocks[victim]
            evicted.append(victim)
        return evicted
