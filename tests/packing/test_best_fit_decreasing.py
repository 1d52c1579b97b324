from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import DataError
from twinkle_core.packing import pack

capacities = st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 8193, 65536, 65537, 200_001]))
lengths_and_capacity = capacities.flatmap(
    lambda capacity: st.tuples(
        st.one_of(
            st.lists(st.integers(1, capacity), min_size=1, max_size=80),
            st.lists(st.integers(1, min(capacity, 5)), min_size=1, max_size=80),
            st.lists(st.sampled_from(range(-(-capacity // 7), capacity + 1, -(-capacity // 7))), min_size=1, max_size=80),
        ),
        st.just(capacity),
    )
)


def one_by_one(lengths: list[int], capacity: int) -> list[list[int]]:
    """Items of each bin: each item, longest first, into the fullest bin that has room; of equal ones the one that has been so longest."""
    bins: list[list[int]] = []
    by_room: dict[int, deque[int]] = {}
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = min((room for room, numbers in by_room.items() if room >= lengths[item] and numbers), default=capacity)
        if by_room.get(room):
            number = by_room[room].popleft()
        else:
            number = len(bins)
            bins.append([])
        bins[number].append(item)
        by_room.setdefault(room - lengths[item], deque()).append(number)
    return [sorted(items) for items in bins]


@given(lengths_and_capacity)
def test_the_rows_are_those_of_one_by_one_best_fit_decreasing(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packed = pack(np.array(lengths), capacity)
    assert [row.tolist() for row in packed] == one_by_one(lengths, capacity)


@given(lengths_and_capacity)
def test_each_item_is_in_one_row_and_no_row_is_over(case: tuple[list[int], int]) -> None:
    lengths, capacity = np.array(case[0]), case[1]
    packed = pack(lengths, capacity)
    assert np.array_equal(np.sort(packed.items), np.arange(len(lengths)))
    assert packed.items.dtype == packed.offsets.dtype == np.int64
    sums = np.add.reduceat(lengths[packed.items], packed.offsets[:-1])
    assert sums.max() <= capacity
    assert np.diff(packed.offsets).min() >= 1
    if len(packed) > 1:  # else the later one's items would have gone into the earlier one
        assert sums[np.argsort(sums)[:2]].sum() > capacity


@given(lengths_and_capacity, st.randoms(use_true_random=False))
def test_contents_by_length_do_not_depend_on_the_order_of_the_items(case: tuple[list[int], int], random: object) -> None:
    lengths, capacity = case
    shuffled = lengths.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = ([sorted(np.array(values)[row].tolist()) for row in pack(np.array(values), capacity)] for values in (lengths, shuffled))
    assert one == other


def test_of_equally_full_rows_the_one_that_has_been_so_longest_is_filled() -> None:
    lengths = [8, 8, 5, 3, 2, 1]
    assert [row.tolist() for row in pack(np.array(lengths), 10)] == [[0, 4], [1, 5], [2, 3]]
    rng = np.random.default_rng(0)
    for capacity in range(5, 45):
        lengths = rng.integers(1, max(2, capacity // 2), 200).tolist()
        assert [row.tolist() for row in pack(np.array(lengths), capacity)] == one_by_one(lengths, capacity)


def test_worked_example_and_types_of_lengths() -> None:
    for kind in (np.int16, np.int32, np.int64, np.uint16, np.uint32):
        assert [row.tolist() for row in pack(np.array([9, 5, 4, 3, 2], dtype=kind), 9)] == [[0], [1, 2], [3, 4]]


def test_more_room_than_all_items_take_costs_nothing() -> None:
    assert [row.tolist() for row in pack(np.array([5, 3, 4]), 10**12)] == [[0, 1, 2]]


def test_a_plan_is_read_by_row() -> None:
    packed = pack(np.array([9, 5, 4, 3, 2]), 9)
    assert len(packed) == 3
    assert packed[1].tolist() == [1, 2]
    assert packed[1].base is packed.items.base or packed[1].base is packed.items
    for row in (3, -1):
        with pytest.raises(IndexError):
            packed[row]


def test_an_empty_item_is_refused_and_no_items_give_no_rows() -> None:
    with pytest.raises(DataError, match="sample 1 has 0 tokens"):
        pack(np.array([3, 0]), 4)
    assert len(pack(np.array([], dtype=np.int64), 4)) == 0


@pytest.mark.parametrize("capacity", [6, 7, 8])
def test_an_item_that_does_not_fit_is_named_not_cut(capacity: int) -> None:
    with pytest.raises(DataError, match=f"sample 0 has 9 tokens, which does not fit a row of 1 to {capacity} \\(1 such samples\\)"):
        pack(np.array([9, 5, 4, 3, 2]), capacity)


def test_more_rows_than_a_radix_digit_holds_keep_their_order() -> None:
    lengths = np.random.default_rng(1).integers(30, 64, 200_000)
    packed = pack(lengths, 64)
    assert len(packed) > 1 << 16
    assert np.array_equal(np.sort(packed.items), np.arange(len(lengths)))
    steps = np.diff(packed.items)
    within = np.ones(len(steps), dtype=bool)
    within[packed.offsets[1:-1] - 1] = False
    assert (steps[within] > 0).all()
    assert np.add.reduceat(lengths[packed.items], packed.offsets[:-1]).max() <= 64


@pytest.mark.parametrize(
    ("mean", "capacity", "draw"),
    [(100, 2048, "gamma"), (600, 4096, "lognormal"), (2500, 8192, "lognormal")],
)
def test_rows_of_usual_lengths_are_full(mean: int, capacity: int, draw: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.gamma(2, mean / 2, 200_000) if draw == "gamma" else rng.lognormal(np.log(mean) - 0.32, 0.8, 200_000)
    lengths = np.clip(values, 1, capacity).astype(np.int64)
    assert lengths.sum() / (len(pack(lengths, capacity)) * capacity) > 0.999
