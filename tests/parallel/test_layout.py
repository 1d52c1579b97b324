"""Who has which part: grids against tables written by hand, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.model.tiny_models import packed_row
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.model.parallel.fully_sharded import settings_from
from twinkle_core.model.parallel.layout import Layout
from twinkle_core.model.parallel.sequence import contiguous_part, cut_batch, zigzag_part
from twinkle_core.model.parallel.ulysses import heads_to_repeat
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import IGNORE


def test_groups_of_a_hand_drawn_mesh() -> None:
    layout = Layout.from_sizes(dp=2, fsdp=4, ulysses=2)
    assert layout.parameter_grid.tolist() == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
    assert layout.sequence_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.is_first_of_slice(rank) for rank in range(8)] == [True, False] * 4
    ring = Layout.from_sizes(fsdp=2, cp=2)
    assert ring.parameter_grid.tolist() == [[[0], [1], [2], [3]]]
    assert (ring.sequence_groups, ring.data_world_size) == ([[0, 1], [2, 3]], 2)
    assert Layout.from_sizes(dp=2, fsdp=2, ep=2).expert_grid.tolist() == [[0, 1], [2, 3]]
    split = Layout.from_sizes(dp=2, tp=2)
    assert split.parameter_grid.tolist() == [[[0, 1]], [[2, 3]]]
    assert [split.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_a_device_mesh_shares_out_data_alike() -> None:
    seen = 0
    for dp, fsdp, other, size in itertools.product((1, 2), (1, 2, 4), ("cp_size", "tp_size", "ulysses_size", "ep_size"), (1, 2)):
        if other in ("ulysses_size", "ep_size") and dp * fsdp % size:
            continue
        mesh = DeviceMesh.from_sizes(dp_size=dp, fsdp_size=fsdp, **{other: size})
        layout = Layout.of(mesh)
        assert layout.data_world_size == mesh.data_world_size
        for rank in range(layout.world_size):
            assert layout.data_rank(rank) == mesh.get_data_rank_from_global_rank(rank)
        assert [rank for rank in range(layout.world_size) if layout.is_first_of_slice(rank)] == mesh.get_collect_ranks()
        assert layout.expert_grid.tolist() == mesh.expert_mesh()[0, :, :, 0].tolist() or layout.ep == 1
        seen += 1
    assert seen > 30


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp_size": 2}, "pp_size is 2"),
        ({"fsdp_size": 2, "etp_size": 2}, "etp_size is 2"),
        ({"tp_size": 2, "sequence_parallel": True}, "sequence_parallel is of Megatron.s layers"),
        ({"fsdp_size": 2, "ulysses_size": 2, "cp_size": 2}, "ulysses_size 2 and cp_size 2 together"),
        ({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, "ep_size 2 goes with dp_size and fsdp_size alone"),
        ({"tp_size": 2, "cp_size": 2}, "tp_size 2 goes with dp_size and fsdp_size alone"),
    ],
)
def test_what_is_not_there_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.of(DeviceMesh.from_sizes(**sizes))


def test_unknown_settings_are_refused_naming_the_known() -> None:
    with pytest.raises(ConfigError, match="fsdp_config has offload; known: activation_checkpointing, checkpoint_every, cpu_offload"):
        settings_from({"offload": True}, "no", False)
    with pytest.raises(ConfigError, match="activation_checkpointing is 'some'; known: no, full, selective"):
        settings_from({"activation_checkpointing": "some"}, "no", False)


def test_parts_by_hand() -> None:
    assert [contiguous_part([3, 2], 2, index).source.tolist() for index in (0, 1)] == [[0, 1, 2], [3, 4, -1]]
    assert contiguous_part([3, 2], 2, 0).seq_lens == (3, 2, 1)
    assert [zigzag_part([7], 2, index).source.tolist() for index in (0, 1)] == [[0, 1, 6, -1], [2, 3, 4, 5]]
    assert zigzag_part([7, 4], 2, 1).source.tolist() == [2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("form", ["ulysses", "ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_computed_once_and_padding_predicts_nothing(form: str, size: int) -> None:
    batch = InputProcessor().collate([packed_row(7, 5), packed_row(1, 9, weighted=True)])
    cuts = [cut_batch(batch, form, size, index) for index in range(size)]  # type: ignore[arg-type]
    assert len({cut["input_ids"].shape for cut in cuts}) == 1
    found = torch.cat([torch.stack([cut[name][0] for name in ("input_ids", "labels", "position_ids")], 1) for cut in cuts])
    whole = torch.stack([batch[name][0] for name in ("input_ids", "labels", "position_ids")], 1)
    real = sorted(map(tuple, found[found[:, 0] > 0].tolist()))
    assert real == sorted(map(tuple, whole.tolist()))
    assert (found[found[:, 0] == 0][:, 1] == IGNORE).all()
    assert sum(cut["loss_weights"].sum() for cut in cuts) == pytest.approx(float(batch["loss_weights"].sum()))
    assert sum(cuts[0]["seq_lens"]) == size * cuts[0]["input_ids"].shape[1]


def test_heads_are_repeated_or_refused() -> None:
    assert [heads_to_repeat(8, 2, size) for size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert heads_to_repeat(12, 3, 2) == 2
    with pytest.raises(ConfigError, match="ulysses_size 3 does not divide the model's 8 attention heads"):
        heads_to_repeat(8, 2, 3)
