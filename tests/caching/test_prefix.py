"""The index of pages and the pool beneath it, against literal expectations."""

import pytest

from engine.pages import PagePool
from engine.prefix import PrefixIndex


def chain(index, pages, tokens):
    """The nodes of a request with these tokens and pages."""
    blocks, nodes = [], []
    index.extend(blocks, tokens, len(pages))
    for block, page in zip(blocks, pages, strict=True):
        nodes.append(index.insert(nodes[-1] if nodes else None, block, page))
    return blocks, nodes


def test_a_digest_is_the_sha256_of_the_one_before_and_the_tokens():
    index, blocks = PrefixIndex(2), []
    index.extend(blocks, [1, 2, 3, 4, 5], 2)
    assert [block.digest.hex()[:16] for block in blocks] == ["34fb5c825de7ca4a", "c57b445f90651b9a"]


def test_a_match_ends_where_tokens_differ():
    index = PrefixIndex(2)
    blocks, nodes = chain(index, [5, 6, 7], [1, 2, 3, 4, 5, 6])
    assert index.match(blocks) == nodes
    other = []
    index.extend(other, [1, 2, 3, 9, 5, 6], 3)
    assert index.match(other) == nodes[:1]


def test_equal_pages_are_known_once():
    index = PrefixIndex(2)
    _, first = chain(index, [5, 6], [1, 2, 3, 4])
    _, again = chain(index, [8, 9], [1, 2, 3, 4])
    assert again == first
    assert len(index) == 2
    assert not index.holds(8)


def test_what_is_behind_a_dropped_page_is_dropped_with_it():
    index = PrefixIndex(2, [40, 41])
    _, nodes = chain(index, [5, 6, 7], [1, 2, 3, 4, 5, 6])
    chain(index, [5, 6, 8], [1, 2, 3, 4, 7, 8])
    index.attach_snapshot(nodes[2], index.take_snapshot())
    assert sorted(index.drop(6)) == [6, 7, 8]
    assert len(index) == 1
    assert [node.alive for node in nodes] == [True, False, False]
    assert sorted(index._free_snapshots) == [40, 41]


def test_a_snapshot_slot_comes_from_the_node_that_used_its_own_longest_ago():
    index = PrefixIndex(2, [40, 41])
    _, nodes = chain(index, [5, 6, 7], [1, 2, 3, 4, 5, 6])
    for node in nodes[:2]:
        index.attach_snapshot(node, index.take_snapshot())
    index.used_snapshot(nodes[0])
    assert index.take_snapshot() == 40
    assert [node.snapshot for node in nodes] == [41, None, None]


def test_kept_pages_count_as_free_and_are_given_away_last():
    index = PrefixIndex(2)
    pool = PagePool(6, keeper=index)
    assert pool.take(3) == [1, 2, 3]
    chain(index, [1, 2], [1, 2, 3, 4])
    pool.release([3, 2, 1], after=4)
    assert (pool.free, pool.fenced, pool.kept) == (2, 3, 0)
    pool.completed(4)
    assert (pool.free, pool.fenced, pool.kept) == (5, 0, 2)
    assert pool.unowned([1, 2, 3]) == 2
    assert pool.take(4) == [4, 5, 3, 2]
    assert index.holds(1)
    assert not index.holds(2)


def test_a_page_shared_before_its_fence_falls_is_nobodys_to_free():
    index = PrefixIndex(2)
    pool = PagePool(3, keeper=index)
    pool.take(1)
    chain(index, [1], [1, 2])
    pool.release([1], after=7)
    pool.share([1])
    pool.completed(7)
    assert (pool.free, pool.kept) == (1, 0)
    pool.release([1], after=8)
    pool.completed(8)
    assert (pool.free, pool.kept) == (2, 1)


def test_a_page_that_nobody_owns_cannot_be_shared():
    with pytest.raises(AssertionError, match="page 1 is nobody's"):
        PagePool(3).share([1])
