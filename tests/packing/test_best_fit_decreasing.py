from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import DataError
from twinkle_core.packing import pack

lengths_and_capacity = st.integers(1, 40).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=60), st.just(c)))


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each bin of the textbook algorithm: each item, longest first, into the fullest bin that has room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(lengths_and_capacity)
def test_each_item_is_in_one_bin_no_bin_is_over_and_the_bins_are_those_of_best_fit(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = pack(np.array(lengths), capacity)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    rooms = sorted(capacity - sum(lengths[i] for i in items) for items in bins)
    assert rooms[0] >= 0
    assert rooms == one_by_one(lengths, capacity)
    assert [items.tolist() for items in pack(np.array(lengths), capacity)] == [items.tolist() for items in bins]


def test_worked_example_and_odd_capacities() -> None:
    assert [b.tolist() for b in pack(np.array([9, 5, 4, 3, 2]), 9)] == [[0], [1, 2], [3, 4]]
    for capacity in (9, 16, 17):
        assert len(pack(np.array([9, 5, 4, 3, 2]), capacity)) < 5


@pytest.mark.parametrize("capacity", [6, 7, 8])
def test_an_item_that_does_not_fit_is_named_not_cut(capacity: int) -> None:
    with pytest.raises(DataError, match=f"sample 0 has 9 tokens, which does not fit a row of 1 to {capacity}"):
        pack(np.array([9, 5, 4, 3, 2]), capacity)


def test_an_empty_item_is_refused_and_no_items_give_no_bins() -> None:
    with pytest.raises(DataError, match="sample 1 has 0 tokens"):
        pack(np.array([3, 0]), 4)
    assert pack(np.array([], dtype=np.int64), 4) == []


def test_two_hundred_thousand_lengths_pack_tightly() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1, 200_000).astype(np.int64) + 1, 1024)
    bins = pack(lengths, 1024)
    assert lengths.sum() / (1024 * len(bins)) > 0.99
