import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import ConfigError
from twinkle_core.infra.dispatch import collect_results, round_robin, split_arguments, split_slices


def test_five_items_on_two_workers_by_hand():
    assert split_slices(list("abcde"), 2) == [["a", "b", "c"], ["d", "e"]]
    assert round_robin(list("abcde"), 2) == [["a", "c", "e"], ["b", "d"]]
    assert split_slices(["a"], 3) == [["a"], [], []]


@given(st.lists(st.integers()), st.integers(1, 9))
def test_every_item_goes_to_exactly_one_worker_in_order_and_shares_differ_by_at_most_one(items, num_workers):
    slices, robin = split_slices(items, num_workers), round_robin(items, num_workers)
    assert collect_results(slices, "flatten") == items
    assert [robin[i % num_workers][i // num_workers] for i in range(len(items))] == items
    for shares in (slices, robin):
        sizes = [len(share) for share in shares]
        assert len(sizes) == num_workers and sum(sizes) == len(items) and max(sizes) - min(sizes) <= 1


def test_only_the_first_argument_is_split():
    assert split_arguments(([1, 2, 3], "x"), "slice", 2) == [([1, 2], "x"), ([3], "x")]
    assert split_arguments(([1, 2, 3], "x"), "all", 2) == [([1, 2, 3], "x")] * 2
    assert split_arguments((), "all", 3) == [(), (), ()]


def test_collects_by_hand():
    assert collect_results([3, 4, 8], "sum") == 15
    assert collect_results([3, 4, 8], "mean") == 5
    assert collect_results([(1.5, 2), (2.5, 4)], "sum") == (4.0, 6)
    assert collect_results([(1.5, 2), (2.5, 4)], "mean") == (2.0, 3)
    assert collect_results([3, 4], "first") == 3
    assert collect_results((3, 4), "none") == [3, 4]


@pytest.mark.parametrize("bad", [lambda: split_arguments(([1],), "slcie", 2), lambda: collect_results([1], "avg")])
def test_unknown_names_are_refused_with_the_known_ones(bad):
    with pytest.raises(ConfigError, match="known: .*"):
        bad()


def test_what_cannot_be_split_is_refused():
    for args in ((), (5,), ("text",)):
        with pytest.raises(ConfigError, match="must be a sequence"):
            split_arguments(args, "slice", 2)
    with pytest.raises(ConfigError, match="at least one worker"):
        split_slices([1], 0)
