"""A loss or gradient that is not finite: found when its number is read, named by step and micro-batch, and never saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.store import open_store
from tests.model.tiny_models import batch, packed_row, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.model import TransformersModel
from twinkle_core.types import PackedRow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=1)


def build(folder: Path, *adapters: str, group: WorkerGroup | None = None) -> TransformersModel:
    model = TransformersModel(folder, seed=3, group=group)
    for name in adapters or ("default",):
        model.add_adapter_to_model(name, LoraConfig(rank=2, dropout=0.0))
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    return model


def poisoned(row: PackedRow) -> PackedRow:
    """One whose loss is infinite."""
    weights = np.ones(len(row.input_ids), dtype=np.float32)
    weights[np.flatnonzero(row.labels != -100)[0]] = np.inf
    return replace(row, loss_weights=weights)


def learn(model: TransformersModel, num_steps: int, bad_step: int = 0, adapter_name: str | None = None) -> tuple[list, list]:
    """Outputs and norms of steps, unread; the second of the bad step's three micro-batches is poisoned."""
    outputs, norms = [], []
    for step in range(1, num_steps + 1):
        rows = [packed_row(5, seed=step), packed_row(6, seed=step), packed_row(7, seed=step)]
        rows[1] = poisoned(rows[1]) if step == bad_step else rows[1]
        outputs.append(model.forward_backward(rows, adapter_name=adapter_name))
        norms.append(model.clip_grad_and_step(adapter_name=adapter_name))
    return outputs, norms


BAD = r"loss of micro-batch 1 is inf at optimizer step 3; look at its rows"


def test_numbers_before_it_are_given_and_all_from_it_on_raise_again_and_again(folder: Path) -> None:
    model, sound = build(folder), build(folder)
    outputs, norms = learn(model, 5, bad_step=3)
    expected, _ = learn(sound, 5)
    for number in (outputs[4].loss_sum, norms[2], norms[4], outputs[2].loss_sum, norms[2]):
        with pytest.raises(TrainingError, match=BAD):
            float(number)
    assert [output.loss for output in outputs[:2]] == [output.loss for output in expected[:2]]
    assert all(0 < norm < 1e3 for norm in norms[:2])
    with pytest.raises(TrainingError, match=BAD):
        model.calculate_metric()


SAVES: list[Callable[[TransformersModel, Path], object]] = [
    lambda model, out: model.save("x", out),
    lambda model, out: model.begin_save(str(out), "x"),
    lambda model, out: model.finish_window(),
]


@pytest.mark.parametrize("save", SAVES, ids=["save", "begin_save", "finish_window"])
def test_nothing_is_saved_though_nobody_looked(folder: Path, tmp_path: Path, save: Callable[[TransformersModel, Path], object]) -> None:
    model = build(folder)
    learn(model, 4, bad_step=3)
    for _ in range(2):
        with pytest.raises(TrainingError, match=BAD + ".*restore an earlier checkpoint"):
            save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list(open_store(str(tmp_path / "out")).list(""))


def test_a_short_last_window_is_looked_at_too(folder: Path, tmp_path: Path) -> None:
    model = TransformersModel(folder, seed=3)
    model.add_adapter_to_model("default", LoraConfig(rank=2), gradient_accumulation_steps=4)
    model.set_optimizer("AdamW", lr=1e-2)
    model.forward_backward(batch(2))
    model._group._worker.state().gradients.flat[3] = math.nan
    with pytest.raises(TrainingError, match="gradient norm is nan at optimizer step 1"):
        model.save("x", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_gradient_that_is_not_finite_names_the_step(folder: Path) -> None:
    model = build(folder)
    learn(model, 1)
    model.forward_backward(batch(2))
    model._group._worker.state().gradients.flat[3] = -math.inf
    norm = model.clip_grad_and_step()
    with pytest.raises(TrainingError, match="gradient norm is inf at optimizer step 2"):
        print(f"{norm:.3f}")


def test_only_a_restored_state_may_be_saved_again_and_weights_alone_are_none(folder: Path, tmp_path: Path) -> None:
    model, other = build(folder), build(folder)
    learn(model, 2)
    good = model.save("good", tmp_path)
    outputs, norms = learn(model, 3, bad_step=2)
    with pytest.raises(TrainingError, match="loss of micro-batch 1 is inf at optimizer step 4"):
        model.save("bad", tmp_path)
    model.load(good)
    with pytest.raises(TrainingError, match="at optimizer step 4"):
        model.save("bad", tmp_path)  # the moments still bear its marks
    assert model.resume_from_checkpoint(good)["cur_step"] == 2
    again = model.save("again", tmp_path)
    assert (again / "optimizer.safetensors").read_bytes() == (good / "optimizer.safetensors").read_bytes()
    assert norms[0] > 0 and outputs[0].loss > 0, "what was sound is still read"
    assert not math.isfinite(norms[1]), "and what was not is what it was, now that it harms nobody"
    other.resume_from_checkpoint(good)
    (mine, _), (theirs, _) = learn(model, 2), learn(other, 2)
    assert [output.loss for output in mine] == [output.loss for output in theirs]
    assert model.calculate_metric()["loss"] == other.calculate_metric()["loss"]


def test_weights_alone_with_a_new_optimizer_are_a_sound_model_too(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    learn(model, 1)
    good = model.save("good", tmp_path)
    learn(model, 2, bad_step=1)
    model.set_optimizer("AdamW", lr=1e-2)
    with pytest.raises(TrainingError, match="at optimizer step 2"):
        model.save("bad", tmp_path)  # new moments, but not the weights
    model.load(good)  # and now the weights
    assert model.save("again", tmp_path)


def test_weights_that_the_last_step_itself_broke_are_not_saved_either(folder: Path, tmp_path: Path) -> None:
    """At the first step the gradient of every A is zero, for B is: with eps=0 AdamW divides zero by zero. Loss and norm are sound."""
    model = TransformersModel(folder, seed=3)
    model.add_adapter_to_model("default", LoraConfig(rank=2, dropout=0.0))
    model.set_optimizer("AdamW", lr=1e-2, eps=0.0)
    (output,), (norm,) = learn(model, 1)
    assert output.loss > 0 and norm > 0
    broken = r"adapter_model\.safetensors is not saved: 7 of 14 tensors .* not finite .*lora_A"
    with pytest.raises(TrainingError, match=broken):
        model.save("x", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    model.begin_save(str(tmp_path / "store"), "x")
    with pytest.raises(TrainingError, match=broken):
        model.end_save()
    assert open_store(str(tmp_path / "store")).list("") == []


def test_one_adapters_trouble_is_not_anothers(folder: Path, tmp_path: Path) -> None:
    model = build(folder, "one", "two")
    learn(model, 1, bad_step=1, adapter_name="one")
    outputs, norms = learn(model, 2, adapter_name="two")
    assert outputs[0].loss > 0 and norms[1] > 0
    assert model.save("two", tmp_path, adapter_name="two")
    with pytest.raises(TrainingError, match="at optimizer step 1"):
        model.save("one", tmp_path, adapter_name="one")


def test_by_parts_a_loss_is_looked_at_before_anything_is_learnt_from_it(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    model.forward([packed_row(5), poisoned(packed_row(6))])
    with pytest.raises(TrainingError, match="loss of micro-batch 1 is inf at optimizer step 1"):
        model.calculate_loss()
    with pytest.raises(ConfigError, match="backward has no loss"):
        model.backward()
    learn(model, 1)
    assert model.save("x", tmp_path)


def test_an_overflow_of_float16_is_no_trouble(folder: Path, tmp_path: Path) -> None:
    model = TransformersModel(folder, mixed_precision="fp16")
    model.add_adapter_to_model("default", LoraConfig(rank=2))
    model.set_optimizer("AdamW", lr=1e-2)
    model.forward_backward(batch(2))
    model._group._worker.state().gradients.flat[3] = math.inf
    norm = model.clip_grad_and_step()
    assert math.isinf(norm) and model.cur_step == 0
    assert model.save("x", tmp_path)
    assert not any(torch.isnan(torch.from_numpy(value)).any() for value in model.get_state_dict().values())


def test_a_number_of_a_model_whose_worker_hosts_another_by_now_is_lost_and_takes_none_of_the_others(folder: Path) -> None:
    old = build(folder)
    unread = learn(old, 1)[1][0]
    new = build(folder, group=old._group)
    output = new.forward_backward(batch(1))
    with pytest.raises(TrainingError, match="is lost"):
        float(unread)
    assert output.loss > 0
