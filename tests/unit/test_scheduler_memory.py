"""Blocks: who holds them, who finds them again, and in which order they are given up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.block_pool import BlockPool
from services.scheduler.events import GroupSpec, InventoryBlock, ModelSpec, Request
from services.scheduler.kv_cache import KvCache, blocks_for
from services.scheduler.sequence import Sequence

A, B, C, D = (bytes([i]) * 32 for i in range(4))
MODEL = ModelSpec("m", 1000, 100, b"f" * 32)


def label_chain(pool: BlockPool, ids: list[int], hashes: list[bytes]) -> None:
    assert all(pool.label(block_id, block_hash) for block_id, block_hash in zip(ids, hashes, strict=True))


def test_released_blocks_are_found_again_until_they_are_handed_out() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    label_chain(pool, ids, [A, B])
    pool.release(ids)
    assert pool.num_free == 4
    assert pool.num_matched([A, B, C], 3) == 2
    assert pool.share([A, B]) == ids
    assert pool.num_free == 2
    pool.release(ids)
    pool.allocate(4)
    assert pool.num_matched([A], 1) == 0
    assert pool.num_evicted == 2


def test_blank_blocks_go_first_then_leaves_then_parents() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(3)
    label_chain(pool, ids, [A, B, C])
    pool.release(ids)
    order = [pool.allocate(1)[0] for _ in range(4)]
    assert order[0] not in ids
    assert order[1:] == ids[::-1]


def test_a_chain_used_later_outlives_one_used_earlier() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    label_chain(pool, first, [A])
    label_chain(pool, second, [B])
    pool.release(first)
    pool.release(second)
    pool.release(pool.share([A]))
    assert pool.allocate(1) == second


def test_a_block_in_use_is_never_handed_out() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    label_chain(pool, held, [A])
    pool.share([A])
    pool.release(held)
    assert pool.allocate(1) != held
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_twins_one_label() -> None:
    pool = BlockPool(3)
    (first,), (second,), (third,) = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    assert pool.label(first, A)
    assert not pool.label(second, A), "the other is held: it keeps the label"
    pool.release([first])
    assert pool.label(third, A), "the other is only cached: it yields"
    assert pool.find(A) == third
    pool.check({second: 1, third: 1})


def test_giving_back_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(1)
    pool.release(ids)
    with pytest.raises(ValueError, match="not held"):
        pool.release(ids)


def test_labels_taken_back() -> None:
    pool = BlockPool(2)
    held, cached = pool.allocate(2)
    label_chain(pool, [held, cached], [A, B])
    pool.release([cached])
    pool.unlabel(held)
    pool.unlabel(cached)
    assert pool.find(A) is pool.find(B) is None
    pool.check({held: 1})


def test_inventory_is_taken_in_by_last_use() -> None:
    blocks = [
        InventoryBlock(0, 3, A, 30),
        InventoryBlock(0, 1, B, 10),
        InventoryBlock(0, 2, A, 5),
        InventoryBlock(0, 9, C, 1),
    ]
    cache = KvCache([GroupSpec("mla", 4)], blocks)
    pool = cache.groups[0].pool
    assert pool.find(C) is None, "no such block"
    assert cache.num_free == 4
    handed_out = [pool.allocate(1)[0] for _ in range(4)]
    assert handed_out == [0, 2, 1, 3], "blank ones, then by last use; of two copies the later one was kept"


def test_groups_are_counted_as_one() -> None:
    cache = KvCache([GroupSpec("a", 5), GroupSpec("b", 3)])
    assert cache.num_blocks == cache.num_free == 3
    tables, shares = cache.admit([], 3)
    assert cache.grow(tables, shares, 2, 2) == tables
    assert [len(table) for table in tables] == [2, 2]
    assert cache.num_free == 1
    assert all(group.pool.label(table[0], A) for group, table in zip(cache.groups, tables, strict=True))
    cache.groups[0].pool.label(tables[0][1], B)
    assert cache.num_matched([A, B], 2) == 1, "a hit is what every group can serve"
    assert cache.num_exclusive(tables) == 2
    cache.release(tables, shares)
    assert cache.num_idle([A], 1) == 1


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert blocks_for(num_tokens) == num_blocks


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_accounts_balance_after_any_history(rng: object, num_blocks: int) -> None:
    """And a child is never more recently used than its parent."""
    import random

    assert isinstance(rng, random.Random)
    pool = BlockPool(num_blocks)
    chains = [[bytes([c, i]) * 16 for i in range(4)] for c in range(3)]
    held: list[list[int]] = []
    for _ in range(40):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            chain = rng.choice(chains)
            num_hit = pool.num_matched(chain, rng.randrange(len(chain) + 1))
            ids = pool.share(chain[:num_hit])
            num_new = min(rng.randrange(3), pool.num_free, len(chain) - num_hit)
            new = pool.allocate(num_new)
            for block_id, block_hash in zip(new, chain[num_hit:], strict=False):
                if not pool.label(block_id, block_hash):
                    break
            held.append(ids + new)
        users: dict[int, int] = {}
        for table in held:
            for block_id in table:
                users[block_id] = users.get(block_id, 0) + 1
        pool.check(users)
        order = list(pool._cached)
        for chain in chains:
            found = [b for h in chain if (b := pool.find(h)) is not None]
            cached = [order.index(b) for b in found if b in pool._cached]
            assert cached == sorted(cached, reverse=True), "a parent would be evicted before its child"


def hashes_of(
    tokens: list[int], num_prompt: int, *, model: ModelSpec = MODEL, salt: str = "", caching: bool = True
) -> list[bytes]:
    from rorqual.core.token_ids import pack_token_ids

    request = Request(request_id="r", num_prompt_tokens=num_prompt, cache_salt=salt)
    seq = Sequence(1, request, pack_token_ids(tokens), 1, 0.0)
    seq.hash_blocks(len(tokens) // 64, model, caching=caching)
    return seq.hashes


def test_identity_is_the_whole_prefix() -> None:
    first, second = list(range(64)), list(range(64, 128))
    base = hashes_of(first + second, 128)
    assert hashes_of(first + second + [5], 129) == base
    assert hashes_of(second + second, 128)[1] != base[1], "the same tokens after others"
    assert hashes_of(first + second, 128, salt="tenant")[0] != base[0]
    assert hashes_of(first + second, 128, model=ModelSpec("m", 1000, 100, b"g" * 32))[0] != base[0]
    assert hashes_of(first + second, 64) == base, "generated tokens serve other prompts"


def test_deterministic_blocks_with_generated_tokens_serve_only_a_resume() -> None:
    model = ModelSpec("m", 1000, 100, b"f" * 32, deterministic=True)
    tokens = list(range(128))
    as_prompt, resumed = hashes_of(tokens, 128, model=model), hashes_of(tokens, 100, model=model)
    assert as_prompt[0] == resumed[0], "prompt tokens only"
    assert as_prompt[1] != resumed[1]
    assert resumed == hashes_of(tokens, 100, model=model)
    assert resumed[1] != hashes_of(tokens, 101, model=model)[1]
