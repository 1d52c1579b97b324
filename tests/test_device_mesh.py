"""Meshes drawn by hand, and the laws that hold for all of them."""

import copy
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twinkle_core.device_mesh import DeviceGroup, DeviceMesh, place_ranks
from twinkle_core.errors import ConfigError

# pp 2 x dp 2 x tp 2:
#   stage 0       tp0 tp1     stage 1       tp0 tp1
#     dp0          0   1        dp0          4   5
#     dp1          2   3        dp1          6   7
PIPELINE = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2)
# dp 2 x fsdp 4, ulysses 2: data ranks below the ranks
#   dp0   0 1 2 3      dp1   4 5 6 7
#         0 0 1 1            2 2 3 3
ULYSSES = DeviceMesh.from_sizes(dp_size=2, fsdp_size=4, ulysses_size=2)
# dp 2 x cp 2 x tp 2:
#   dp0: cp0  0 1   cp1  2 3      dp1: cp0  4 5   cp1  6 7
CONTEXT = DeviceMesh.from_sizes(world_size=8, dp_size=2, cp_size=2, tp_size=2)


def per_rank(mesh: DeviceMesh, name: str) -> list:
    return [getattr(mesh.at_rank(rank), name) for rank in range(mesh.world_size)]


def test_a_pipeline_of_two_stages_with_tensor_and_data_parallel_ranks():
    assert PIPELINE.world_size == 8 and PIPELINE.data_world_size == 2
    assert per_rank(PIPELINE, "pp_rank") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert per_rank(PIPELINE, "dp_rank") == [0, 0, 1, 1, 0, 0, 1, 1]
    assert per_rank(PIPELINE, "tp_rank") == [0, 1, 0, 1, 0, 1, 0, 1]
    assert per_rank(PIPELINE, "data_rank") == [0, 0, 1, 1, 0, 0, 1, 1]
    assert per_rank(PIPELINE, "fsdp_rank") == [None] * 8
    assert PIPELINE.get_pp_first_ranks() == [0, 1, 2, 3] == PIPELINE.get_pp_stage_ranks(0)
    assert PIPELINE.get_pp_last_ranks() == [4, 5, 6, 7]
    assert PIPELINE.get_tp_last_ranks() == [1, 3, 5, 7]
    assert PIPELINE.get_collect_ranks() == [4, 6]
    assert PIPELINE.at_rank(6).get_tp_ranks() == [6, 7]
    assert PIPELINE.get_dim_ranks("pp", 3) == [3, 7]
    assert PIPELINE.get_dim_ranks(("dp", "tp"), 5) == [4, 5, 6, 7]
    assert [PIPELINE.at_rank(rank).is_pp_first_rank() for rank in (3, 4)] == [True, False]
    assert [PIPELINE.at_rank(rank).is_pp_last_rank() for rank in (3, 4)] == [False, True]
    assert [PIPELINE.is_tp_last_rank(rank) for rank in (2, 3)] == [False, True]
    assert PIPELINE.order == "tp-cp-ep-dp-pp"


def test_ulysses_peers_are_neighbours_that_share_a_slice():
    assert per_rank(ULYSSES, "dp_rank") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert per_rank(ULYSSES, "fsdp_rank") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert per_rank(ULYSSES, "data_rank") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert ULYSSES.data_world_size == 4
    assert ULYSSES.get_collect_ranks() == [0, 2, 4, 6]
    # ten rows on four data ranks: 3, 3, 2, 2
    assert [ULYSSES.get_slice(10, rank) for rank in range(4)] == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]
    assert ULYSSES.at_rank(5).get_slice(10) == slice(6, 8)
    assert not ULYSSES.has_dim("ulysses") and not ULYSSES.has_dim("tp") and ULYSSES.has_dim("fsdp")


def test_context_and_tensor_parallel_peers_share_a_slice():
    assert per_rank(CONTEXT, "cp_rank") == [0, 0, 1, 1, 0, 0, 1, 1]
    assert per_rank(CONTEXT, "data_rank") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert CONTEXT.get_collect_ranks() == [0, 4]
    assert CONTEXT.get_dim_size("cp") == 2 == CONTEXT.cp_world_size and CONTEXT.pp_world_size == 1
    assert CONTEXT.get_pp_stage_ranks(0) == list(range(8))


def test_experts_are_spread_over_neighbours_of_a_stage():
    # fsdp 4, ep 2: experts' shares 0 1 0 1, sharded over two ranks each: {0, 2} and {1, 3}
    mesh = DeviceMesh.from_sizes(fsdp_size=4, ep_size=2)
    assert per_rank(mesh, "ep_rank") == [0, 1, 0, 1]
    assert mesh.ep_world_size == 2 and mesh.ep_fsdp_world_size == 2 and mesh.data_world_size == 4
    assert mesh.expert_mesh()[0, :, 0, 0].tolist() == [0, 2] and mesh.expert_mesh()[0, :, 1, 0].tolist() == [1, 3]
    # Megatron's fold: dp 2 x tp 2 with ep 4 takes the tensor-parallel ranks too; two pipeline stages of four
    folded = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2, ep_size=4, etp_size=1)
    assert per_rank(folded, "ep_rank") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert per_rank(DeviceMesh.from_sizes(dp_size=2), "ep_rank") == [None, None]


def test_shards_and_replicas_of_them():
    # dp 2 x fsdp 3:    fsdp0 fsdp1 fsdp2
    #   dp0               0     1     2
    #   dp1               3     4     5
    mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=3)
    assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]] and mesh.mesh_dim_names == ("dp", "fsdp")
    assert per_rank(mesh, "dp_rank") == [0, 0, 0, 1, 1, 1]
    assert per_rank(mesh, "fsdp_rank") == [0, 1, 2, 0, 1, 2]
    assert per_rank(mesh, "data_rank") == [0, 1, 2, 3, 4, 5] and mesh.data_world_size == 6
    assert (mesh.dp_world_size, mesh.fsdp_world_size, mesh.tp_world_size) == (2, 3, 1)
    assert mesh.get_dim_ranks("fsdp", 4) == [3, 4, 5] and mesh.get_dim_ranks("dp", 4) == [1, 4]
    assert mesh.get_collect_ranks() == [0, 1, 2, 3, 4, 5] and mesh.get_pp_last_ranks() == [0, 1, 2, 3, 4, 5]
    assert [mesh.get_slice(7, rank) for rank in range(6)] == [slice(0, 2), *(slice(one, one + 1) for one in range(2, 7))]


def test_all_five_axes_at_once():
    # pp 2 x dp 2 x fsdp 2 x cp 2 x tp 2, fastest last: rank = 16 pp + 8 dp + 4 fsdp + 2 cp + tp
    mesh = DeviceMesh.from_sizes(world_size=32, pp_size=2, dp_size=2, fsdp_size=2, cp_size=2, tp_size=2)
    at = mesh.at_rank(16 + 4 + 2)  # second stage, first replica, second shard, second part of the row, first of its layer's parts
    assert (at.pp_rank, at.dp_rank, at.fsdp_rank, at.cp_rank, at.tp_rank, at.data_rank) == (1, 0, 1, 1, 0, 1)
    assert at.get_tp_ranks() == [22, 23] and at.get_dim_ranks("cp") == [20, 22] and at.get_dim_ranks("fsdp") == [18, 22]
    assert at.get_dim_ranks("dp") == [22, 30] and at.get_dim_ranks("pp") == [6, 22]
    assert at.get_dim_ranks(("dp", "fsdp")) == [18, 22, 26, 30]
    assert mesh.get_collect_ranks() == [16, 20, 24, 28] and mesh.data_world_size == 4


def test_an_expert_is_split_over_neighbours_and_sharded_over_the_rest():
    # pp 2, a stage of dp 4 x tp 2 ranks; its experts see ep_fsdp 2 x ep 2 x etp 2:
    #   stage 0    ep0       ep1          stage 1    ep0       ep1
    #     copy 0   0 1       2 3            copy 0   8 9      10 11
    #     copy 1   4 5       6 7            copy 1  12 13     14 15
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=4, tp_size=2, ep_size=2, etp_size=2, ep_fsdp_size=2)
    assert mesh.expert_mesh().tolist() == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]]
    assert per_rank(mesh, "ep_rank") == [0, 0, 1, 1] * 4
    assert (mesh.ep_world_size, mesh.etp_world_size, mesh.ep_fsdp_world_size) == (2, 2, 2)
    assert (
        DeviceMesh.from_sizes(pp_size=2, dp_size=4, tp_size=2, ep_size=2, etp_size=2).expert_mesh().tolist() == mesh.expert_mesh().tolist()
    )
    assert mesh.data_world_size == 4 and per_rank(mesh, "tp_rank") == [0, 1] * 8, "experts change nothing for the other layers"


def test_virtual_stages_are_those_of_a_pipelines_ranks():
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, vpp_size=3)
    # each rank of a stage holds three of the six virtual stages; ranks, groups and data are those of two stages
    assert mesh.vpp_size == 3 and mesh.world_size == 4
    assert per_rank(mesh, "pp_rank") == [0, 0, 1, 1] and mesh.get_pp_last_ranks() == [2, 3]
    assert per_rank(mesh, "data_rank") == [0, 1, 0, 1] and mesh.get_collect_ranks() == [2, 3]


def test_one_process_is_a_mesh_of_its_own():
    mesh = DeviceMesh.from_sizes()
    assert mesh.is_single_process and mesh.data_rank == 0 and mesh.get_slice(5) == slice(0, 5) and mesh.get_tp_ranks() == [0]
    with pytest.raises(ConfigError, match="which of the 8 ranks"):
        _ = PIPELINE.data_rank


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "dp_size": 2, "tp_size": 2}, r"dp 2 x tp 2 = 4 ranks, but world_size is 8"),
        ({"dp_size": 2, "fsdp_size": 3, "ulysses_size": 4}, r"ulysses_size 4 does not divide dp x fsdp = 6"),
        ({"fsdp_size": 4, "ep_size": 3}, r"ep_size 3 x etp_size 1 x ep_fsdp_size None does not make up the 4 ranks"),
        ({"fsdp_size": 4, "ep_size": 2, "ep_fsdp_size": 1}, r"ep_size 2 x etp_size 1 x ep_fsdp_size 1 does not make up the 4 ranks"),
        ({"tp_size": 0}, r"tp_size is 0"),
        ({"vpp_size": 2}, r"vpp_size is 2 without a pipeline"),
        ({"device_type": "tpu"}, r"device_type is 'tpu'; known: cuda, gpu, npu, cpu"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(sizes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DeviceMesh.from_sizes(**sizes)


def test_what_the_mesh_has_not_is_refused():
    for call, message in [
        (lambda: PIPELINE.get_dim_size("cp"), "no axis 'cp'; its axes: pp, dp, tp"),
        (lambda: PIPELINE.get_data_rank_from_global_rank(8), "rank 8 is not in a mesh of 8"),
        (lambda: PIPELINE.get_slice(3, 2), "data rank 2 is not below data_world_size 2"),
        (lambda: PIPELINE.get_pp_stage_ranks(2), "pipeline stage 2 is not below pp_size 2"),
        (lambda: PIPELINE.at_rank(9), "rank is 9"),
        (lambda: DeviceMesh(mesh=np.array([0, 2]), mesh_dim_names=("dp",)), "each rank from 0 to 1 once"),
        (lambda: DeviceMesh(mesh=np.arange(2), mesh_dim_names=("rows",)), "out of pp, dp, fsdp, cp, tp"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()


sizes = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, sizes, st.integers(0, 40))
def test_slices_partition_the_batch_and_each_data_rank_is_collected_once(pp, dp, fsdp, cp, tp, ulysses, total):
    assume(dp * fsdp % ulysses == 0)
    mesh = DeviceMesh.from_sizes(pp_size=pp, dp_size=dp, fsdp_size=fsdp, cp_size=cp, tp_size=tp, ulysses_size=ulysses)
    rows = list(range(total))
    shares = {rank: rows[mesh.at_rank(rank).get_slice(total)] for rank in range(mesh.world_size)}
    collected = mesh.get_collect_ranks()
    assert [row for rank in collected for row in shares[rank]] == rows
    assert [mesh.get_data_rank_from_global_rank(rank) for rank in collected] == list(range(mesh.data_world_size))
    assert set(collected) <= set(mesh.get_pp_last_ranks())
    for rank in range(mesh.world_size):
        assert all(shares[peer] == shares[rank] for peer in mesh.get_dim_ranks(("pp", "cp", "tp"), rank))
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1


@given(sizes, sizes, sizes)
def test_groups_along_an_axis_partition_the_ranks(pp, dp, tp):
    mesh = DeviceMesh.from_sizes(pp_size=pp, dp_size=dp, tp_size=tp)
    for axis in ("pp", "dp", "tp"):
        groups = {tuple(mesh.get_dim_ranks(axis, rank)) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.get_dim_size(axis)}


def test_equal_meshes_are_equal():
    assert copy.deepcopy(ULYSSES) == ULYSSES == DeviceMesh.from_sizes(dp_size=2, fsdp_size=4, ulysses_size=2)
    assert ULYSSES.at_rank(1) != ULYSSES and DeviceMesh.from_sizes(dp_size=2, fsdp_size=4) != ULYSSES
    assert len({ULYSSES, ULYSSES.at_rank(1).at_rank(1), ULYSSES.at_rank(1)}) == 2
    assert DeviceMesh.from_sizes(device_type="GPU").device_type == "cuda"


def test_groups_take_their_ranks():
    groups = [
        DeviceGroup("a", 2, "GPU"),
        DeviceGroup("b", [0, 3], "cuda"),
        DeviceGroup("c", 2, "CPU"),
        DeviceGroup("d", 4, "GPU", gpus_per_worker=2, visible_devices="4, 5, 6, 7"),
    ]
    assert place_ranks(groups) == {"a": (1, 2), "b": (0, 3), "c": (0, 1), "d": (4, 5, 6, 7)}
    assert groups[3].num_workers == 2 and groups[3].devices_of(1) == ("6", "7") and groups[0].devices_of(0) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceGroup("a", 3, "GPU", gpus_per_worker=2), "3 ranks do not divide by gpus_per_worker 2"),
        (lambda: DeviceGroup("a", [1, 1], "GPU"), r"\[1, 1\]; each may be named once"),
        (lambda: DeviceGroup("a", 2, "CPU", gpus_per_worker=2), "runs on the CPU"),
        (lambda: DeviceGroup("a", 2, "GPU", visible_devices=[0]), "2 are needed, one a rank"),
        (lambda: DeviceGroup("a", 0, "GPU"), "ranks of group 'a' is 0"),
        (lambda: place_ranks([DeviceGroup("a", [0], "GPU"), DeviceGroup("b", [0], "GPU")]), "rank 0 is in the groups 'a' and 'b'"),
        (lambda: place_ranks([DeviceGroup("a", 1, "GPU"), DeviceGroup("a", 1, "CPU")]), "two groups are called 'a'"),
    ],
)
def test_groups_that_cannot_be_are_refused(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def _reduce_along_axes(rank: int, meeting: str, answers) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=4)
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cpu")
    found = {"data_rank": mesh.data_rank}
    for axis in ("dp", "tp"):
        value = torch.tensor(10**rank)
        dist.all_reduce(value, group=mesh.get_dim_group(axis))
        found[axis] = int(value)
    torch_mesh = mesh.to_torch_device_mesh()
    found["torch"] = [torch_mesh.get_local_rank("dp"), torch_mesh.get_local_rank("tp")]
    found["known"] = mesh.get_dim_group("tp") is mesh.get_dim_group(["tp"])
    found["new"] = mesh.create_process_group("tp") is mesh.get_dim_group("tp")
    try:
        DeviceMesh.from_sizes(dp_size=2).get_dim_group("dp")
    except ConfigError as error:
        found["refused"] = str(error)
    answers.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_four_processes_reduce_along_the_axes_of_their_mesh(tmp_path: Path):
    # dp0: 0 1, dp1: 2 3. The sum of 10**rank names the ranks that met.
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_reduce_along_axes, args=(rank, str(tmp_path / "meeting"), answers)) for rank in range(4)]
    for process in processes:
        process.start()
    got = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    assert [got[rank]["dp"] for rank in range(4)] == [101, 1010, 101, 1010]
    assert [got[rank]["tp"] for rank in range(4)] == [11, 11, 1100, 1100]
    assert [got[rank]["data_rank"] for rank in range(4)] == [0, 0, 1, 1]
    assert [got[rank]["torch"] for rank in range(4)] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert all(found["known"] and not found["new"] for found in got.values())
    assert all("a mesh of 2 ranks needs a process group of as many; this one has 4" in found["refused"] for found in got.values())
