from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.mix import mix

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@given(COUNTS)
def test_concatenate_and_interleave_take_every_row_once(counts: list[int]) -> None:
    there = {source: count for source, count in enumerate(counts) if count}
    assert Counter(mix(counts, "concatenate")) == Counter(mix(counts, "interleave")) == there
    assert list(mix(counts, "concatenate")) == sorted(mix(counts, "interleave"))


@given(COUNTS)
def test_interleave_takes_turns_until_a_source_is_used_up(counts: list[int]) -> None:
    order = list(mix(counts, "interleave"))
    for place in range(len(order)):
        taken = Counter(order[:place])
        assert all(abs(taken[a] - taken[b]) <= 1 for a in range(len(counts)) for b in range(len(counts))
                   if taken[a] < counts[a] and taken[b] < counts[b])  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4))
def test_weighted_keeps_to_the_shares_and_ends_when_one_is_used_up(sources: list[tuple[int, int]]) -> None:
    counts, weights = [count for count, _ in sources], [weight for _, weight in sources]
    order = list(mix(counts, "weighted", weights))
    taken = Counter(order)
    assert all(taken[source] <= count for source, count in enumerate(counts))
    assert len(order) == sum(counts) or any(taken[source] == count for source, count in enumerate(counts))
    for place in range(len(order) + 1):
        so_far = Counter(order[:place])
        assert all(abs(so_far[source] - place * weight / sum(weights)) < len(weights) for source, weight in enumerate(weights))


def test_weights_are_relative_and_what_is_left_over_is_left() -> None:
    assert list(mix([6, 6], "weighted", [2, 1])) == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert list(mix([6, 6], "weighted", [0.2, 0.1])) == list(mix([6, 6], "weighted", [2, 1]))
    assert list(mix([3, 3], "weighted", [1, 1])) == [0, 1, 0, 1, 0, 1]
    assert list(mix([3, 0], "weighted", [1, 1])) == [0]
    assert list(mix([1, 8], "weighted", [1, 3])) == [1, 0, 1, 1, 1]
    with pytest.raises(DataError, match="2 sources need as many weights"):
        list(mix([1, 1], "weighted", [1]))
