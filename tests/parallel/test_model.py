"""A user's loop on a spread model: steps, LoRA and full, save and resume, to the bit where the ranks are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.tiny_models import save_model
from tests.parallel.oracle import packed_rows
from tests.parallel.ranks import run_ranks
from twinkle_core.config import LoraConfig
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel

NUM_STEPS = 4


def trained(
    rank: int,
    folder: Path,
    mesh: DeviceMesh | None,
    world_size: int,
    lora: bool,
    start: Path | None,
    stop_after: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Steps from `start` (a saved folder) or 0 to `stop_after`; saves there. Losses and norms of the steps, and the weights."""
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=world_size, init_method="unused: the group is joined")
    model = TransformersModel(folder, group=group, device_mesh=mesh, mixed_precision="no", **settings)
    if lora:
        model.add_adapter_to_model("default", LoraConfig(rank=4, target_modules=("q_proj", "down_proj"), dropout=0.0))
    model.set_optimizer("AdamW", lr=0.02)
    model.set_lr_scheduler("linear", num_training_steps=NUM_STEPS + 1, num_warmup_steps=0)
    first = model.resume_from_checkpoint(start)["cur_step"] if start else 0
    said, scores = [], []
    for step in range(first, stop_after):
        rows = packed_rows(3 + step)
        output = model.forward_backward(rows[:2])
        rest = model.forward_backward(rows[2:])
        said.append((output.loss_sum + rest.loss_sum, output.num_loss_tokens + rest.num_loss_tokens, model.clip_grad_and_step(1.0)))
    if mesh is not None and mesh.cp_world_size > 1:
        with pytest.raises(ConfigError, match="cuts rows over ranks"):
            model.forward_only(packed_rows(3))
    else:
        scores = [score["loss_sum"] for score in model.forward_only(packed_rows(3))]
    saved = str(model.save(f"step-{stop_after}-{lora}-{world_size}", folder.parent / "saved")) if start is None else ""
    return {"said": said, "weights": model.get_state_dict(), "scores": scores, "saved": saved}


CASES = [
    pytest.param({"fsdp_size": 2}, False, {"memory_efficient_init": True}, id="fsdp2-full"),
    pytest.param({"fsdp_size": 2}, True, {"memory_efficient_init": True}, id="fsdp2-lora"),
    pytest.param({"fsdp_size": 2}, True, {"fsdp_config": {"activation_checkpointing": "full"}}, id="fsdp2-lora-sharded"),
    pytest.param({"cp_size": 2}, True, {}, id="ring2-lora"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "lora", "settings"), CASES)
def test_a_spread_model_learns_what_one_process_learns_and_resumes_to_the_bit(
    sizes: dict[str, int], lora: bool, settings: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    mesh = DeviceMesh.from_sizes(world_size=2, **sizes)
    alone = run_ranks(1, trained, tmp_path, folder, None, 1, lora, None, NUM_STEPS, {})[0]
    spread = run_ranks(2, trained, tmp_path, folder, mesh, 2, lora, None, NUM_STEPS, settings)
    half = run_ranks(2, trained, tmp_path, folder, mesh, 2, lora, None, NUM_STEPS // 2, settings)
    resumed = run_ranks(2, trained, tmp_path, folder, mesh, 2, lora, Path(half[0]["saved"]), NUM_STEPS, settings)
    np.testing.assert_allclose(spread[0]["said"], alone["said"], rtol=2e-4)
    if spread[0]["scores"]:
        np.testing.assert_allclose(spread[0]["scores"], alone["scores"], rtol=1e-3)
    assert spread[0]["said"] == spread[1]["said"]
    assert resumed[0]["said"] == spread[0]["said"][NUM_STEPS // 2 :]
    assert spread[0]["weights"].keys() == alone["weights"].keys()
    for name, value in spread[0]["weights"].items():
        np.testing.assert_array_equal(resumed[0]["weights"][name], value, err_msg=name)
        assert not np.array_equal(value, half[0]["weights"][name]), name


def test_a_mesh_of_another_size_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a device_mesh of 2 ranks, but 1 process"):
        TransformersModel(folder, device_mesh=DeviceMesh.from_sizes(fsdp_size=2))
