"""Which pages hold which beginnings of prompts. Pure Python.

A full page is known by a chain: the SHA-256 of the digest of the page before it and of its own token ids. A digest
only finds a candidate. Before a page is used its tokens are compared, and the page before it must be the one that was
compared just now; so what is used has equal tokens from the first to the last, whatever the hash does.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True)
class Block:
    """The tokens of one full page (int32 bytes) and the digest of everything up to its end."""

    digest: bytes
    tokens: bytes


@dataclass(eq=False)
class Node:
    """A page whose content is known. `snapshot`: the slot that holds the recurrent state after its last token."""

    block: Block
    page: int
    parent: Node | None
    children: set[Node] = field(default_factory=set)
    snapshot: int | None = None
    alive: bool = True


class PrefixIndex:
    """`snapshot_slots`: slots for recurrent states, given up least recently used first. `hash`: of bytes."""

    def __init__(
        self, page_size: int, snapshot_slots: Iterable[int] = (), hash: Callable[[bytes], bytes] = sha256
    ) -> None:
        self.page_size = page_size
        self._hash = hash
        self._nodes: dict[bytes, Node] = {}
        self._by_page: dict[int, Node] = {}
        self._free_snapshots = list(snapshot_slots)
        self._snapshots: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def extend(self, blocks: list[Block], tokens: Sequence[int], pages: int) -> None:
        """Brings `blocks`, the first of a request's, up to `pages` full pages of its tokens."""
        size = self.page_size
        for i in range(len(blocks), pages):
            content = array("i", tokens[i * size : (i + 1) * size]).tobytes()
            before = blocks[-1].digest if blocks else b""
            blocks.append(Block(self._hash(before + content), content))

    def match(self, blocks: Sequence[Block]) -> list[Node]:
        """The nodes of the longest beginning of `blocks` that is known."""
        nodes: list[Node] = []
        parent = None
        for block in blocks:
            node = self._nodes.get(block.digest)
            if node is None or node.parent is not parent or node.block.tokens != block.tokens:
                break
            nodes.append(node)
            parent = node
        return nodes

    def insert(self, parent: Node | None, block: Block, page: int) -> Node | None:
        """The node of `block` after `parent`, which gets `page` if it is new; None where its digest is another's."""
        node = self._nodes.get(block.digest)
        if node is not None:
            return node if node.parent is parent and node.block.tokens == block.tokens else None
        node = Node(block, page, parent)
        self._nodes[block.digest] = self._by_page[page] = node
        if parent is not None:
            parent.children.add(node)
        return node

    def holds(self, page: int) -> bool:
        return page in self._by_page

    def drop(self, page: int) -> list[int]:
        """Forgets the content of a page, and that of every page behind it: they could not be found any more."""
        first = self._by_page[page]
        if first.parent is not None:
            first.parent.children.discard(first)
        dropped, waiting = [], [first]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            node.alive = False
            self.free_snapshot(node)
            del self._nodes[node.block.digest], self._by_page[node.page]
            dropped.append(node.page)
        return dropped

    # ------------------------------------------------------------------------------------------ snapshots

    def take_snapshot(self) -> int | None:
        """A slot for a state, taken from the node that used its own longest ago if need be; None: there are none."""
        if not self._free_snapshots and self._snapshots:
            self.free_snapshot(next(iter(self._snapshots)))
        return self._free_snapshots.pop() if self._free_snapshots else None

    def attach_snapshot(self, node: Node, slot: int) -> None:
        """The state at the end of `node` is in `slot`."""
        if node.snapshot is not None or not node.alive:
            self._free_snapshots.append(slot)
            return
        node.snapshot = slot
        self._snapshots[node] = None

    def used_snapshot(self, node: Node) -> None:
        self._snapshots.move_to_end(node)

    def free_snapshot(self, node: Node) -> None:
        if node.snapshot is not None:
            self._free_snapshots.append(node.snapshot)
            node.snapshot = None
            del self._snapshots[node]

    def return_snapshot(self, slot: int) -> None:
        """Gives back a slot that no node got."""
        self._free_snapshots.append(slot)
