from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.preprocessor.split import groups, split


def digests(values: list[int]) -> np.ndarray:
    return np.array([[value % 3, value] for value in values], dtype=np.uint64).reshape(-1, 2)


@given(st.lists(st.integers(0, 2**40), unique=True, min_size=1, max_size=60), st.floats(0, 0.99), st.integers(0, 5))
def test_distinct_rows_are_held_out_in_the_exact_number_whatever_their_order(values: list[int], share: float, seed: int) -> None:
    mask = split([digests(values)], [share], seed)[0]
    assert mask.sum() == round(share * len(values))
    turned = split([digests(values[::-1])], [share], seed)[0]
    assert turned[::-1].tolist() == mask.tolist()


@given(st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=3), st.floats(0, 0.9))
def test_identical_rows_are_on_one_side_also_across_sources(sources: list[list[int]], share: float) -> None:
    masks = split([digests(values) for values in sources], [share] * len(sources), 0)
    sides: dict[int, set[bool]] = {}
    for values, mask in zip(sources, masks, strict=True):
        for value, flag in zip(values, mask.tolist(), strict=True):
            sides.setdefault(value, set()).add(flag)
    assert all(len(side) == 1 for side in sides.values())
    assert masks[0].sum() <= round(share * len(sources[0]))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.floats(0, 0.9))
def test_no_group_that_is_left_would_have_fitted(values: list[int], share: float) -> None:
    mask = split([digests(values)], [share], 0)[0]
    room = round(share * len(values)) - int(mask.sum())
    assert all(values.count(value) > room for value, flag in zip(values, mask.tolist(), strict=True) if not flag)


def test_a_source_follows_what_an_earlier_one_has_placed_and_counts_it() -> None:
    first, second = split([digests([1, 2, 3, 4]), digests([1, 2, 3, 4, 5, 6])], [0.5, 0.5], 7)
    assert second[:4].tolist() == first.tolist()
    assert (first.sum(), second.sum()) == (2, 3)


def test_the_seed_changes_which_rows_are_held_out() -> None:
    masks = [split([digests(list(range(100)))], [0.2], seed)[0] for seed in (0, 1, -1)]
    assert [int(mask.sum()) for mask in masks] == [20, 20, 20]
    assert len({mask.tobytes() for mask in masks}) == 3


def test_which_rows_are_held_out_is_the_same_everywhere() -> None:
    assert np.flatnonzero(split([digests(list(range(12)))], [0.25], 0)[0]).tolist() == GOLDEN


def test_adding_rows_moves_few() -> None:
    before = split([digests(list(range(1000)))], [0.1], 0)[0]
    after = split([digests(list(range(1010)))], [0.1], 0)[0][:1000]
    assert 0 <= (before != after).sum() <= 20


@given(st.lists(st.integers(0, 5), max_size=30))
def test_groups_number_equal_rows_alike(values: list[int]) -> None:
    found = groups(digests(values)).tolist()
    assert [[a == b for a in found] for b in found] == [[a == b for a in values] for b in values]
    assert set(found) == set(range(len(set(values))))


GOLDEN = [6, 7, 11]
