"""Reported faults of checkpoints and resuming, with their right values (the case's name is in each docstring)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.model.tiny_models import batch, packed_row, save_model
from tests.parallel.ranks import run_ranks
from twinkle_core.checkpoint.folders import newest_whole_folder, numbered_folders
from twinkle_core.config import LoraConfig
from twinkle_core.dataloader import DataLoader
from twinkle_core.errors import ConfigError
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel
from twinkle_core.model.parallel.sharded_files import write_parts

CASES = Path(__file__).parents[3] / "shared" / "cases"
shared = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
LORA = LoraConfig(rank=4, alpha=8, dropout=0.1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen2")


def build(base: Path, lora: LoraConfig | None = LORA, **group: Any) -> TransformersModel:
    model = TransformersModel(base, seed=3, **group)
    if lora:
        model.add_adapter_to_model("default", lora)
    model.set_optimizer("AdamW", lr=1e-2)
    return model


@shared
def test_half_written_checkpoints_are_passed_over_with_a_reason_each() -> None:
    """RS07"""
    found = newest_whole_folder(CASES / "RS07" / "out")
    assert found.path is not None
    assert found.path.name == json.loads((CASES / "RS07" / "expected.json").read_text())["pick"]
    cut, without_state = found.problems
    assert "checkpoint-30" in cut
    assert "adapter_model.safetensors has 87 bytes, not 88" in cut or "adapter_model.safetensors" in cut
    assert "trainer_state.json cannot be read" in cut
    assert "checkpoint-20" in without_state
    assert "trainer_state.json is missing" in without_state


@pytest.fixture(scope="module")
def two_saves(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint-step-1 and checkpoint-step-2 of one run."""
    out, model = tmp_path_factory.mktemp("out"), build(base)
    for step in range(2):
        model.forward_backward(batch(2, seed=step))
        model.clip_grad_and_step()
        model.save(output_dir=out, consumed_train_samples=2 * (step + 1))
    return out


SAVED = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "trainer_state.json",
    "training.json",
)


@pytest.mark.parametrize("left", ["nothing", "0 bytes", "1 byte", "half", "all but a byte"])
@pytest.mark.parametrize("file", SAVED)
def test_our_own_files_cut_anywhere_are_noticed(two_saves: Path, file: str, left: str, tmp_path: Path) -> None:
    """RS07 with the project's own files. The last byte of our JSON is a line feed: without it the file still says all that it said."""
    out = shutil.copytree(two_saves, tmp_path / "out")
    assert newest_whole_folder(out).path == out / "checkpoint-step-2"
    path = out / "checkpoint-step-2" / file
    data = path.read_bytes()
    assert {path.name for path in path.parent.iterdir()} == set(SAVED)
    path.write_bytes(data[: {"0 bytes": 0, "1 byte": 1, "half": len(data) // 2}.get(left, len(data) - 1)])
    if left == "nothing":
        path.unlink()
    found = newest_whole_folder(out)
    if left == "all but a byte" and data.endswith(b"}\n"):
        assert found.path == out / "checkpoint-step-2"
        return
    assert found.path == out / "checkpoint-step-1"
    (problem,) = found.problems
    assert file in problem


@pytest.mark.parametrize("damage", ["none", "index missing", "index cut", "part missing", "part cut", "training.json missing"])
def test_a_folder_of_a_model_that_lies_in_parts_is_whole_with_all_of_them(two_saves: Path, damage: str, tmp_path: Path) -> None:
    """RS07 where every worker wrote its part of the optimizer's state."""
    out = shutil.copytree(two_saves, tmp_path / "out")
    newest = out / "checkpoint-step-2"
    moments = load_file(newest / "optimizer.safetensors")
    (newest / "optimizer.safetensors").unlink()
    (newest / "optimizer").mkdir()
    write_parts(newest / "optimizer", moments, 0, 1)
    files = {"index": newest / "optimizer" / "index.json", "part": newest / "optimizer" / "whole.safetensors"}
    name, _, kind = damage.partition(" ")
    path = files.get(name, newest / name)
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    found = newest_whole_folder(out)
    assert found.path == (newest if damage == "none" else out / "checkpoint-step-1")
    assert damage == "none" or path.name in found.problems[0]


def test_no_whole_folder_is_none_and_a_wrong_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    found = newest_whole_folder(tmp_path)
    assert found.path is None
    assert found.problems[0].startswith(f"{tmp_path / 'checkpoint-3'} is not used: trainer_state.json is missing; no weights (")
    with pytest.raises(ConfigError, match="does not exist here"):
        newest_whole_folder(tmp_path / "nowhere")


@shared
def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    """RS09: by the number, with 900 touched last; other names are left out."""
    out = shutil.copytree(CASES / "RS09" / "out", tmp_path / "out")
    out.chmod(0o755)
    os.utime(out / "checkpoint-900")
    names = [path.name for path in numbered_folders(out)]
    assert names[0] == json.loads((CASES / "RS09" / "expected.json").read_text())["pick"]
    assert names == ["checkpoint-1000", "checkpoint-0950", "checkpoint-900"]


@shared
def test_the_learning_rate_of_each_step_is_that_of_an_uninterrupted_run(base: Path, tmp_path: Path) -> None:
    """RS11: 20 steps of a cosine, stopped after 9: the next one is taken at 0.578217."""
    table = json.loads((CASES / "RS11" / "expected.json").read_text())["lr_used_at_step"]

    def scheduled() -> TransformersModel:
        model = TransformersModel(base, seed=3)
        model.add_adapter_to_model("default", LORA)
        model.set_optimizer("SGD", lr=1.0)
        model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=20, num_warmup_steps=0)
        return model

    def steps(model: TransformersModel, start: int, stop: int) -> list[float]:
        rates = []
        for step in range(start, stop):
            rates.append(model.get_lr())
            model.forward_backward(batch(1, seed=step))
            model.clip_grad_and_step(0.01)
        return rates

    first = scheduled()
    rates = steps(first, 0, 9)
    resumed = scheduled()
    assert resumed.resume_from_checkpoint(first.save("stop", tmp_path))["cur_step"] == 9
    rates += steps(resumed, 9, 20)
    assert rates == pytest.approx(table, abs=5e-7)


def test_a_resumed_adapter_is_the_saved_one_and_not_wrapped_anew(base: Path, tmp_path: Path) -> None:
    """RS13: tensors, the number of them that learn, and the moments of just these are those saved."""

    def step(model: TransformersModel, number: int) -> float:
        loss = model.forward_backward(batch(3, seed=number)).loss
        model.clip_grad_and_step()
        return loss

    def state(model: TransformersModel) -> dict[str, np.ndarray]:
        held = model._group._worker.state()
        moments = {f"optimizer.{name}": value.numpy() for name, value in held.optimizer.tensors().items()}
        return model.get_state_dict() | moments

    first = build(base)
    for number in range(3):
        step(first, number)
    folder = first.save("stop", tmp_path)
    saved = {name: value.copy() for name, value in state(first).items()}
    resumed = build(base)
    untouched = {name: value.copy() for name, value in resumed.get_state_dict().items()}
    resumed.resume_from_checkpoint(folder)
    found = state(resumed)
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    for name in untouched:
        assert np.abs(found[f"optimizer.{name}.exp_avg"]).max() > 0, name
    assert any((found[name] != untouched[name]).any() for name in untouched)

    def learning(model: TransformersModel) -> list[str]:
        return sorted(name for name, value in model._group._worker.model.named_parameters() if value.requires_grad)

    assert learning(resumed) == learning(first)
    assert len(learning(first)) == len(untouched) > 0
    assert step(resumed, 3) == step(first, 3)


NUM_ROWS, BATCH, STOP = 13, 3, 2
"""13 rows in batches of 3: the batches do not divide by the ranks, and the last one holds 1 row."""


def by_ranks(rank: int, base: Path, world_size: int, lora: LoraConfig | None, start: Path | None, out: Path | None) -> dict[str, Any]:
    """Steps from `start` to the end, or from 0 to `STOP` and saved in `out`. Which rows each step took, and the losses."""
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=world_size, init_method="unused: the group is joined")
    model = build(base, lora, group=group)
    loader = DataLoader(list(range(NUM_ROWS)), batch_size=BATCH, seed=7, num_epochs=1)
    if start is not None:
        loader.resume_from_checkpoint(model.resume_from_checkpoint(start)["consumed_train_samples"])
    rows, losses = [], []
    for numbers in loader:
        output = model.forward_backward([packed_row(4 + number % 5, 3, seed=number) for number in numbers], seed=(1, model.cur_step))
        model.clip_grad_and_step()
        rows.append(numbers)
        losses.append(output.loss)
        if out is not None and len(rows) == STOP:
            model.save("stop", out, consumed_train_samples=STOP * BATCH)
            break
    return {"rows": rows, "losses": losses, "weights": model.get_state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LoraConfig(rank=4, alpha=8, dropout=0.0), None], ids=["lora", "full"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2), (4, 3)])
def test_another_number_of_workers_takes_every_remaining_sample_once(
    base: Path, sizes: tuple[int, ...], lora: LoraConfig | None, tmp_path: Path
) -> None:
    """RS15: saved by 2 and resumed by 1, and so on; the rows are those of one process, and losses and weights near its."""
    alone = run_ranks(1, by_ranks, tmp_path, base, 1, lora, None, None, limit_seconds=240)[0]
    first = run_ranks(sizes[0], by_ranks, tmp_path, base, sizes[0], lora, None, tmp_path, limit_seconds=240)[0]
    assert sorted(number for step in alone["rows"] for number in step) == list(range(NUM_ROWS))
    for size in sizes[1:]:
        resumed = run_ranks(size, by_ranks, tmp_path, base, size, lora, tmp_path / "stop", None, limit_seconds=240)[0]
        assert first["rows"] + resumed["rows"] == alone["rows"]
        assert first["losses"] + resumed["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        for name, value in alone["weights"].items():
            # Sums are added in another order, and AdamW makes a gradient near zero as large as any: a tenth of a step, no more.
            np.testing.assert_allclose(resumed["weights"][name], value, atol=1e-3, err_msg=name)
