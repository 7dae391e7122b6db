"""Blocks: who owns one, which hold a prefix, and that none is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.engine.kv_cache import BlockPool, extend_names

SIZE = 4


def names(tokens, salt=b"v0", size=SIZE):
    out: list[bytes] = []
    extend_names(out, tokens, len(tokens) // size, size, salt)
    return out


def filled(pool, tokens, salt=b"v0"):
    """Blocks for all full blocks of `tokens`, computed and published."""
    blocks = [pool.allocate() for _ in names(tokens)]
    for block, name in zip(blocks, names(tokens, salt), strict=True):
        pool.publish(block, name)
    return blocks


def test_a_name_stands_for_the_whole_prefix_and_the_weights():
    """C12: the same block of tokens after another prefix, or under other weights, has another name."""
    a, b = names([1, 2, 3, 4, 9, 9, 9, 9]), names([1, 2, 3, 5, 9, 9, 9, 9])
    assert a[1] != b[1]
    assert not set(a) & set(names([1, 2, 3, 4, 9, 9, 9, 9], b"v1"))
    assert names([1, 2, 3, 4, 9, 9, 9, 9, 7]) == a


def test_names_grow_without_being_made_again():
    whole, tokens = names(list(range(16))), list(range(16))
    grown: list[bytes] = []
    for count in range(1, 5):
        extend_names(grown, tokens, count, SIZE, b"v0")
    assert grown == whole


def test_the_longest_prefix_is_found_and_shared():
    pool = BlockPool(10, SIZE)
    blocks = filled(pool, list(range(12)))
    found = pool.match(names([*range(8), 99, 99, 99, 99]))
    assert found == blocks[:2]
    pool.release(blocks)
    assert pool.num_available == 9 - 2
    pool.release(found)
    assert pool.num_available == 9


def test_block_zero_is_never_handed_out():
    pool = BlockPool(6, SIZE)
    assert sorted(pool.allocate() for _ in range(5)) == [1, 2, 3, 4, 5]
    assert pool.num_available == 0


def test_unused_prefixes_are_found_until_their_memory_is_needed_the_oldest_first():
    pool = BlockPool(5, SIZE)
    old, new = list(range(8)), list(range(50, 58))
    for tokens in (old, new):
        pool.release(filled(pool, tokens))
    assert pool.num_available == 4
    taken = pool.allocate()
    assert len(pool.match(names(old))) == 1, "of a prefix its last block goes first"
    assert len(pool.match(names(new))) == 2
    assert taken not in pool.match(names(new))


def test_discarded_blocks_are_not_found_and_are_named_for_scrubbing_once_nobody_uses_them():
    pool = BlockPool(6, SIZE)
    blocks = filled(pool, list(range(8)))
    other = pool.match(names(list(range(8))))
    pool.discard(blocks)
    assert pool.match(names(list(range(8)))) == []
    assert pool.take_dirty() == []
    pool.discard(other)
    assert sorted(pool.take_dirty()) == sorted(blocks)
    assert pool.take_dirty() == []
    assert pool.num_available == 5


def test_a_flush_forgets_prefixes_and_leaves_blocks_with_their_users():
    pool = BlockPool(6, SIZE)
    held, unused = filled(pool, list(range(8))), filled(pool, list(range(50, 58)))
    pool.release(unused)
    pool.flush()
    assert pool.match(names(list(range(8)))) == pool.match(names(list(range(50, 58)))) == []
    assert pool.num_available == 3
    pool.release(held)
    assert pool.num_available == 5


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["take", "match", "release", "discard", "flush"]), st.integers(0, 30))))
def test_no_order_of_calls_loses_a_block_or_gives_one_twice(calls):
    pool = BlockPool(12, SIZE)
    held: list[list[int]] = []
    for call, n in calls:
        tokens = [n % 3] * (SIZE * (1 + n % 4))
        if call == "take" and pool.num_available >= len(tokens) // SIZE:
            held.append(filled(pool, tokens))
        elif call == "match":
            held.append(pool.match(names(tokens)))
        elif call in ("release", "discard") and held:
            getattr(pool, call)(held.pop(n % len(held)))
        elif call == "flush":
            pool.flush()
        used = {block for blocks in held for block in blocks}
        assert pool.num_available + len(used) == 11
    for blocks in held:
        pool.release(blocks)
    everything = [pool.allocate() for _ in range(pool.num_available)]
    assert sorted(everything) == list(range(1, 12))
