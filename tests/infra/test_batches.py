import numpy as np
import pytest

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.batches import Split

TWO_BY_TWO = DeviceMesh.from_sizes(dp_size=2, tp_size=2)


def shares(split: Split, *args, **kwargs) -> list:
    return [split.share(worker, args, kwargs) for worker in range(split.num_workers)]


def test_every_batch_is_cut_alike_and_settings_go_to_all():
    split = Split(dispatch="slice", num_workers=2)
    rows, weights, columns = [1, 2, 3], np.array([0.1, 0.2, 0.3]), {"a": [4, 5, 6], "b": [7, 8, 9]}
    first, second = shares(split, rows, (0.9, 0.99), weights=weights, columns=columns, name="abc", table={"lr": 1.0})
    assert first[0] == ([1, 2], (0.9, 0.99)) and second[0] == ([3], (0.9, 0.99))
    assert first[1]["weights"].tolist() == [0.1, 0.2] and second[1]["weights"].tolist() == [0.3]
    assert first[1]["columns"] == {"a": [4, 5], "b": [7, 8]} and second[1]["columns"] == {"a": [6], "b": [9]}
    assert first[1]["name"] == second[1]["name"] == "abc" and first[1]["table"] == {"lr": 1.0}


def test_peers_of_a_data_rank_get_the_same():
    split = Split(dispatch="slice_dp", num_workers=4, mesh=TWO_BY_TWO)
    assert [args[0] for args, _ in shares(split, list("abcde"))] == [list("abc"), list("abc"), list("de"), list("de")]


def test_a_callable_shares_out_as_it_likes():
    def reversed_ranks(num_workers, worker, args, kwargs, device_mesh):
        return (args[0][num_workers - 1 - worker],), {"of": device_mesh.world_size}

    split = Split(dispatch=reversed_ranks, num_workers=2, mesh=DeviceMesh.from_sizes(dp_size=2))
    assert shares(split, ["a", "b"]) == [(("b",), {"of": 2}), (("a",), {"of": 2})]


@pytest.mark.parametrize(
    ("split", "args", "message"),
    [
        (Split(dispatch="slice", num_workers=2, what="A.f"), ([1, 2], [1]), "A.f splits .* argument 0 2, argument 1 1"),
        (
            Split(dispatch="slice", num_workers=2, min_items=1, what="A.f"),
            ([1],),
            r"A.f needs at least 1 .* on 2 workers are 1, 0",
        ),
        (Split(dispatch="slice_dp", num_workers=2, mesh=TWO_BY_TWO), (1,), "this one has 4"),
        (Split(dispatch="slcie", num_workers=2), ([1],), "known: all, slice, round_robin, slice_dp"),
        (Split(dispatch="slice", num_workers=2), ({"a": [1, 2], "b": [1]},), "columns of different lengths: 1, 2"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(split: Split, args: tuple, message: str):
    with pytest.raises(ConfigError, match=message):
        split.share(0, args, {})
