"""Orders and batches as pure functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.dataloader import permutation, rank_slice, token_batches, windowed_permutation
from twinkle_core.dataloader.order import rank_rows
from twinkle_core.errors import DataError


def test_the_order_is_frozen() -> None:
    assert permutation(8, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    assert permutation(8, 42, 1).tolist() == [4, 5, 3, 0, 2, 7, 1, 6]
    assert windowed_permutation([2, 3, 1, 2], 42, 0, 2).tolist() == [0, 1, 5, 2, 7, 6, 4, 3]
    rows, ends = token_batches(np.array([3, 1, 2, 3, 1, 2]), 4, 42, 0, shuffle=True)
    assert (rows.tolist(), ends.tolist()) == ([2, 1, 4, 5, 3, 0], [1, 4, 5, 6])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    for draw in (permutation, lambda n, seed, epoch: windowed_permutation([5] * (n // 5), seed, epoch, 3)):
        assert len({tuple(draw(50, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}) == 4


shards = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@settings(deadline=None)
@given(shards, st.integers(0, 3), st.integers(0, 3), st.integers(1, 13))
def test_windows_hold_whole_shards_and_every_row_comes_once(sizes: list[int], seed: int, epoch: int, window: int) -> None:
    order = windowed_permutation(sizes, seed, epoch, window)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    if len(sizes) <= window:
        assert order.tolist() == permutation(sum(sizes), seed, epoch).tolist()
        return
    shard_of = np.repeat(np.arange(len(sizes)), sizes)[order]
    seen: set[int] = set()
    at = 0
    for group in windows(sizes, seed, epoch, window):
        rows = sum(sizes[shard] for shard in group)
        assert set(shard_of[at : at + rows].tolist()) == {shard for shard in group if sizes[shard]}
        assert not seen & group
        seen |= group
        at += rows
    assert seen == set(range(len(sizes)))


def windows(sizes: list[int], seed: int, epoch: int, window: int) -> list[set[int]]:
    """The shards of each window, in order, of one row a shard: which shards are drawn does not depend on their rows."""
    order = windowed_permutation([1] * len(sizes), seed, epoch, window).tolist()
    return [set(order[at : at + window]) for at in range(0, len(order), window)]


def test_shards_are_drawn_at_random_and_rows_within_windows_are_mixed() -> None:
    order = windowed_permutation([10] * 40, 0, 0, 4)
    shard_of = order // 10
    firsts = [frozenset(windowed_permutation([10] * 40, seed, 0, 4)[:40] // 10) for seed in range(20)]
    assert len(set(firsts)) == 20
    assert np.count_nonzero(np.diff(shard_of[:40])) > 20  # neighbours come from different shards
    assert order[:40].tolist() != sorted(order[:40].tolist())


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=60).map(np.array)


@settings(deadline=None)
@given(lengths, st.integers(20, 50), st.integers(0, 3), st.booleans())
def test_token_batches_hold_every_row_once_and_keep_the_budget(lengths: np.ndarray, budget: int, epoch: int, shuffle: bool) -> None:
    rows, ends = token_batches(lengths, budget, 1, epoch, shuffle=shuffle)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    batches = np.split(rows, ends[:-1])
    assert all(len(batch) and lengths[batch].sum() <= budget for batch in batches)
    # greedy: a batch is only cut where the next row does not fit, so at most one of two neighbours (before the shuffle) is half empty
    assert len(batches) <= 2 * lengths.sum() / budget + 1
    if not shuffle:
        assert rows.tolist() == list(range(len(lengths)))


def test_rows_of_like_length_are_batched_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 20_000)
    rows, ends = token_batches(lengths, 4000, 1, 0, shuffle=True)
    spread = np.mean([np.ptp(lengths[batch]) for batch in np.split(rows, ends[:-1])])
    mixed = np.mean([np.ptp(lengths[batch]) for batch in np.array_split(np.arange(20_000), len(ends))])
    assert spread < mixed / 10
    means = np.array([lengths[batch].mean() for batch in np.split(rows, ends[:-1])])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2  # and the batches themselves are shuffled
    fill = lengths.sum() / (4000 * len(ends))
    assert fill > 0.9


def test_a_row_longer_than_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"row 2 has 9 tokens and fits no batch of max_tokens 8"):
        token_batches(np.array([1, 8, 9]), 8, 0, 0, shuffle=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_ranks_share_each_batch_evenly(sizes: list[int], world_size: int) -> None:
    rows = np.arange(sum(sizes))
    parts = [rank_rows(rows, np.array(sizes), rank, world_size).tolist() for rank in range(world_size)]
    assert sorted(row for part in parts for row in part) == rows.tolist()
    batches = np.split(rows, np.cumsum(sizes)[:-1])
    for rank in range(world_size):
        assert parts[rank] == [row for batch in batches for row in batch[rank_slice(len(batch), rank, world_size)].tolist()]
    for size in sizes:
        shares = [len(range(size)[rank_slice(size, rank, world_size)]) for rank in range(world_size)]
        assert sum(shares) == size
        assert shares == sorted(shares, reverse=True)
        assert shares[0] - shares[-1] <= 1
