"""The prompt cache: requests start from pages and recurrent states that others have left. Pure Python.

A page is published when the step that fills it is planned: the device runs steps in order and a step writes its keys
and values before it reads any, so whatever is planned later, even a piece of the same step, finds it written.

A model with recurrent layers can start only where a snapshot of their state was taken. Snapshots cost no extra step:
one is taken when a piece happens to end with a page, so every request leaves one in each page that its answer fills
(only its last is kept) and each long prompt where it was cut. Where a prompt shares more pages than there is a
snapshot for, it is cut at their end, so that whoever comes next can start there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.pages import PagePool
from engine.prefix import Block, Node, PrefixIndex


@dataclass
class Memory:
    """What the prompt cache knows of a request in one residence, but for `blocks`, which outlast it.

    `nodes`: of its first pages. `start`: tokens that it did not compute. `cut`: where a piece must end for a snapshot,
    0: nowhere. `pending`: (position, slot) of a snapshot whose page is not published yet. `moving`: the node with the
    last snapshot that its answer left.
    """

    blocks: list[Block] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    start: int = 0
    cut: int = 0
    pending: tuple[int, int] | None = None
    moving: Node | None = None


@dataclass(frozen=True)
class Found:
    """What a request can start from: the pages `nodes`, and how many tokens more share pages but no snapshot."""

    nodes: list[Node]
    cut: int


class PromptCache:
    """`recurrent`: the model has states that only a snapshot brings back."""

    def __init__(self, index: PrefixIndex, pool: PagePool, recurrent: bool) -> None:
        self.index = index
        self.pool = pool
        self.recurrent = recurrent
        self.page_size = index.page_size

    def find(self, memory: Memory, tokens: list[int]) -> Found:
        """What is known of the beginning of `tokens`; the last token is always computed, for its logits."""
        pages = (len(tokens) - 1) // self.page_size
        self.index.extend(memory.blocks, tokens, pages)
        nodes = self.index.match(memory.blocks[:pages])
        if not self.recurrent:
            return Found(nodes, 0)
        usable = max((i + 1 for i, node in enumerate(nodes) if node.snapshot is not None), default=0)
        return Found(nodes[:usable], len(nodes) * self.page_size if len(nodes) > usable else 0)

    def adopt(self, memory: Memory, found: Found) -> list[int]:
        """Takes a share of the pages that are found beyond those that the request has; returns them."""
        memory.cut = found.cut
        pages = [node.page for node in found.nodes[len(memory.nodes) :]]
        if pages:
            self.pool.share(pages)
            memory.nodes = list(found.nodes)
            memory.start = len(found.nodes) * self.page_size
            if self.recurrent:
                self.index.used_snapshot(found.nodes[-1])
        return pages

    def publish(self, memory: Memory, tokens: list[int], pages: list[int], scheduled: int) -> None:
        """Lets others find the pages that are full of known tokens. `scheduled`: tokens computed or in flight."""
        nodes = memory.nodes
        full = min(scheduled, len(tokens)) // self.page_size
        if full <= len(nodes) and (not nodes or nodes[-1].alive):
            return
        while nodes and not nodes[-1].alive:
            nodes.pop()
        self.index.extend(memory.blocks, tokens, full)
        for i in range(len(nodes), full):
            node = self.index.insert(nodes[-1] if nodes else None, memory.blocks[i], pages[i])
            if node is None:
                break
            nodes.append(node)
        self._settle(memory)

    def snapshot(self, memory: Memory, position: int, prompting: bool) -> int | None:
        """The slot that gets the state at `position`, where a page ends; None: it is there already, or no slot is."""
        known = position // self.page_size
        if len(memory.nodes) >= known and memory.nodes[known - 1].snapshot is not None:
            return None
        self._drop_pending(memory)
        if memory.moving is not None:
            self.index.free_snapshot(memory.moving)
            memory.moving = None
        slot = self.index.take_snapshot()
        if slot is not None:
            memory.pending = (position, slot)
            self._settle(memory, keep=prompting)
        return slot

    def _settle(self, memory: Memory, keep: bool = False) -> None:
        """Gives a pending snapshot to its node once there is one. `keep`: it is not given up for the next one."""
        if memory.pending is None or len(memory.nodes) * self.page_size < memory.pending[0]:
            return
        node = memory.nodes[memory.pending[0] // self.page_size - 1]
        self.index.attach_snapshot(node, memory.pending[1])
        memory.moving = None if keep else node
        memory.pending = None

    def _drop_pending(self, memory: Memory) -> None:
        if memory.pending is not None:
            self.index.return_snapshot(memory.pending[1])
            memory.pending = None

    def leave(self, memory: Memory) -> Memory:
        """The request gives up its pages; returns what it remembers for another residence."""
        self._drop_pending(memory)
        return Memory(blocks=memory.blocks)
