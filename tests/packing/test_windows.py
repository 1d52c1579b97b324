from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import DataError
from twinkle_core.packing import pack, pack_window, pack_windows

streams = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=120), st.just(capacity), st.integers(1, 40))
)


def rows(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    return [row.tolist() for plan in pack_windows(lengths, capacity, window) for row in plan]


@given(streams)
def test_each_item_is_in_one_row_and_no_row_is_over(case: tuple[list[int], int, int]) -> None:
    lengths, capacity, window = case
    found = rows(lengths, capacity, window)
    assert sorted(item for row in found for item in row) == list(range(len(lengths)))
    assert all(row and row == sorted(row) and sum(lengths[item] for item in row) <= capacity for row in found)


@given(streams)
def test_a_window_over_all_is_the_global_plan(case: tuple[list[int], int, int]) -> None:
    lengths, capacity, _ = case
    assert rows(lengths, capacity, len(lengths) + 1) == [row.tolist() for row in pack(np.array(lengths, dtype=np.int64), capacity)]


@given(streams)
def test_what_is_carried_fills_less_than_a_row_and_going_on_from_it_gives_the_same_rows(case: tuple[list[int], int, int]) -> None:
    lengths, capacity, window = case
    held: list[int] = []
    found = []
    for start in range(0, len(lengths), window):
        held += range(start, min(start + window, len(lengths)))
        here = np.array([lengths[item] for item in held])
        is_last = start + window >= len(lengths)
        plan, carried = pack_window(here, capacity, is_last=is_last)
        found += [[held[at] for at in row] for row in plan]
        held = [held[at] for at in carried]
        assert sum(lengths[item] for item in held) < capacity
        assert held == sorted(held)
    assert held == []
    assert found == rows(lengths, capacity, window)


def test_the_row_opened_last_is_carried_unless_it_is_full_or_the_window_the_last() -> None:
    def packed(lengths: list[int], is_last: bool) -> tuple[list[list[int]], list[int]]:
        plan, carried = pack_window(np.array(lengths, dtype=np.int64), 9, is_last=is_last)
        return [row.tolist() for row in plan], carried.tolist()

    assert packed([9, 5, 4, 3, 2], False) == ([[0], [1, 2]], [3, 4])
    assert packed([9, 5, 4, 3, 2], True) == ([[0], [1, 2], [3, 4]], [])
    assert packed([5, 4, 6, 3], False) == ([[2, 3], [0, 1]], [])
    assert packed([3], False) == ([], [0])
    assert packed([], False) == ([], [])


def test_rows_come_before_the_stream_ends() -> None:
    first = next(pack_windows((7 for _ in count()), 8, 10))
    assert [row.tolist() for row in first] == [[item] for item in range(9)]


def test_an_item_that_does_not_fit_is_named_by_its_place_in_the_stream() -> None:
    plans = pack_windows([4] * 25 + [9] + [4] * 5, 8, 10)
    assert len(list(islice(plans, 2))) == 2
    with pytest.raises(DataError, match="sample 25 has 9 tokens"):
        next(plans)


def test_carrying_beats_windows_on_their_own() -> None:
    lengths = np.clip(np.random.default_rng(0).gamma(2, 50, 20_000), 1, 2048).astype(np.int64)
    carried = len(rows(lengths.tolist(), 2048, 1000))
    alone = sum(len(pack(lengths[start : start + 1000], 2048)) for start in range(0, len(lengths), 1000))
    assert lengths.sum() / (2048 * carried) > 0.999 > lengths.sum() / (2048 * alone)
