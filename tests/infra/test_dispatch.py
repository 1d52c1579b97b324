import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.dispatch import collect_results, split_arguments, worker_slices


def split_slices(items, num_workers):
    return [items[part] for part in worker_slices("slice", len(items), num_workers)]


def round_robin(items, num_workers):
    return [items[part] for part in worker_slices("round_robin", len(items), num_workers)]


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


MESH = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2)  # data ranks 0 0 1 1 | 0 0 1 1; the second four are the last stage


def test_a_mesh_decides_who_shares_a_slice_and_whose_answers_count():
    shares = split_arguments((list("abc"), 7), "slice_dp", 8, MESH)
    assert shares == [(["a", "b"], 7)] * 2 + [(["c"], 7)] * 2 + [(["a", "b"], 7)] * 2 + [(["c"], 7)] * 2
    robin = split_arguments((list("abc"),), "round_robin", 8, MESH)
    assert robin == [(["a", "c"],)] * 2 + [(["b"],)] * 2 + [(["a", "c"],)] * 2 + [(["b"],)] * 2
    answers = [[f"{rank}"] for rank in range(8)]
    assert collect_results(answers, "flatten", MESH) == ["4", "6"]
    assert collect_results([1, 2, 4, 8, 16, 32, 64, 128], "sum", MESH) == 16 + 64
    assert collect_results([1, 2, 4, 8, 16, 32, 64, 128], "mean", MESH) == 40
    assert collect_results(answers, "last_pp", MESH) == [["4"], ["5"], ["6"], ["7"]]
    assert collect_results(answers, "last_pp_first", MESH) == ["4"]
    assert collect_results(answers, "none", MESH) == answers
    assert collect_results([1], "last_pp") == [1], "one worker is a mesh of its own"


def test_callables_share_out_and_collect():
    assert split_arguments(([5, 6],), lambda n, i, args, kwargs, device_mesh: ((args[0][i] * n,), {}), 2) == [(10,), (12,)]
    assert collect_results([1, 2], max) == 2
    assert collect_results([1, 2], lambda results, device_mesh: (sum(results), device_mesh.dp_world_size), MESH) == (3, 2)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="slice_dp.* 2; this one has 8"):
        split_arguments(([1],), "slice_dp", 2, MESH)
    with pytest.raises(ConfigError, match="last_pp.* 2; this one has 8"):
        collect_results([1, 2], "last_pp", MESH)


def test_without_a_mesh_every_worker_is_a_data_rank():
    assert split_arguments((["a", "b", "c"],), "slice_dp", 2) == [(["a", "b"],), (["c"],)]
    assert collect_results([1, 2], "last_pp") == [1, 2]
