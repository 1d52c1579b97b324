import json
import shutil
import threading
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from storage.store import open_store
from storage.transfer import fetch_files
from tests.model.tiny_models import batch, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, DamagedError, DataError, TrainingError
from twinkle_core.model import TransformersModel, background_save
from twinkle_core.model.checkpoint_files import Snapshot, write_snapshot

LORA = LoraConfig(rank=4, alpha=8, dropout=0.1)
FOR_PEOPLE = ("trainer_state.json", "config.json", "generation_config.json")
"""Files of `save` that a resume from a store does without: they make a folder that transformers loads."""
FORMS = pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen2")


def build(base: Path, lora: LoraConfig | None = LORA, lr: float = 1e-2, steps: int = 6) -> TransformersModel:
    model = TransformersModel(base, seed=3)
    if lora is not None:
        model.add_adapter_to_model("mine", lora)
    model.set_optimizer("AdamW", lr=lr, weight_decay=0.01)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=steps, num_warmup_steps=2)
    return model


def train(model: TransformersModel, start: int, stop: int) -> list[tuple[float, float, float]]:
    """Loss, norm and rate of steps [start, stop)."""
    lines = []
    for step in range(start, stop):
        loss = model.forward_backward(batch(3, seed=step), micro_batch_size=2, seed=(9, step)).loss
        lines.append((loss, model.get_lr(), model.clip_grad_and_step()))
    return lines


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@FORMS
def test_restored_equals_uninterrupted_to_the_bit_and_weights_alone_do_not(base: Path, lora: LoraConfig | None, tmp_path: Path):
    whole = build(base, lora)
    train(whole, 0, 3)
    middle = whole.save("middle", tmp_path, consumed_train_samples=9)
    lines = train(whole, 3, 6)

    restored = build(base, lora)
    state = restored.resume_from_checkpoint(middle)
    assert state == {"cur_step": 3, "consumed_train_samples": 9, "gradient_accumulation_steps": 1} and restored.cur_step == 3
    assert train(restored, 3, 6) == lines

    weights_only = build(base, lora)
    weights_only.resume_from_checkpoint(middle, resume_only_model=True)
    assert weights_only.cur_step == 0 and train(weights_only, 3, 6) != lines

    ends = [files_of(model.save(name, tmp_path)) for model, name in ((whole, "a"), (restored, "b"), (weights_only, "c"))]
    assert ends[0] == ends[1] and len(ends[0]) >= 5
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert ends[0][weights] != ends[2][weights] and ends[0]["optimizer.safetensors"] != ends[2]["optimizer.safetensors"]
    assert ends[0][weights] != (middle / weights).read_bytes()


@FORMS
def test_a_background_save_holds_the_state_at_its_begin_whatever_is_trained_after(
    base: Path, lora: LoraConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trained_on = threading.Event()

    def write_late(snapshot: Snapshot, folder: Path) -> None:
        assert trained_on.wait(60)
        write_snapshot(snapshot, folder)

    monkeypatch.setattr(background_save, "write_snapshot", write_late)
    model = build(base, lora)
    train(model, 0, 2)
    expected = files_of(model.save("now", tmp_path))
    store = open_store(str(tmp_path / "store"))
    model.begin_save(store.url, "runs/x")
    train(model, 2, 4)
    with pytest.raises(ConfigError, match="call end_save before"):
        model.begin_save(store.url, "runs/y")
    assert model.end_save(False) is None
    trained_on.set()
    entries = model.end_save(True)
    assert entries is not None and model.end_save(True) is None
    found = files_of(fetch_files(store, "runs/x", entries, tmp_path / "fetched"))
    assert found == {name: data for name, data in expected.items() if name not in FOR_PEOPLE}
    restored = build(base, lora)
    restored.restore(tmp_path / "fetched")
    assert restored.cur_step == 2


def test_a_failing_background_save_is_raised_once_and_the_next_one_works(base: Path, tmp_path: Path):
    model = build(base)
    train(model, 0, 1)
    (tmp_path / "file").write_text("in the way")
    model.begin_save(str(tmp_path / "file"), "x")
    with pytest.raises(OSError, match="file"):
        model.end_save(True)
    model.begin_save(str(tmp_path / "store"), "x")
    assert model.end_save(True)


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build(base)
    train(model, 0, 1)
    return model.save("saved", tmp_path_factory.mktemp("saved"))


def refused(base: Path, folder: Path, error: type[Exception], text: str) -> None:
    """The folder is refused, and nothing of the model was changed by it."""
    model = build(base)
    before = model.get_state_dict()
    with pytest.raises(error, match=text):
        model.restore(folder)
    assert model.cur_step == 0
    for name, value in model.get_state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"])
def test_a_missing_an_extra_and_a_misshapen_tensor_are_refused_by_name(base: Path, saved: Path, file: str, tmp_path: Path):
    good = load_file(saved / file)
    name, tensor = max(good.items(), key=lambda item: item[1].numel())
    bads = {
        f"{name} is missing": {key: value for key, value in good.items() if key != name},
        "intruder is unexpected": good | {"intruder": torch.zeros(2)},
        f"{name} is torch.*, the model has": good | {name: tensor[:-1].contiguous()},
    }
    for number, (text, tensors) in enumerate(bads.items()):
        folder = Path(shutil.copytree(saved, tmp_path / str(number)))
        save_file(tensors, folder / file)
        refused(base, folder, DataError, text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_what_was_saved_with_a_gpu_is_resumed_without_one(base: Path, saved: Path, tmp_path: Path):
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    save_file(load_file(saved / "rng.safetensors") | {"cuda": torch.zeros(16, dtype=torch.uint8)}, folder / "rng.safetensors")
    there, here = build(base), build(base)
    there.restore(folder)
    here.restore(saved)
    assert train(there, 1, 2) == train(here, 1, 2)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors", "training.json"])
def test_a_missing_or_cut_file_is_refused_by_name(base: Path, saved: Path, file: str, tmp_path: Path):
    folder = Path(shutil.copytree(saved, tmp_path / "cut"))
    (folder / file).write_bytes((folder / file).read_bytes()[:-20])
    refused(base, folder, DamagedError, file)
    (folder / file).unlink()
    refused(base, folder, DamagedError, file)


def test_other_settings_than_the_saved_ones_are_refused_with_both_values(base: Path, saved: Path):
    with pytest.raises(ConfigError, match=r"optimizer was .*0\.01.* is .*0\.02"):
        build(base, lr=2e-2).restore(saved)
    with pytest.raises(ConfigError, match="scheduler was"):
        build(base, steps=7).restore(saved)
    for other, text in ((LoraConfig(rank=8, alpha=8), "r was 4, is 8"), (LoraConfig(rank=4, alpha=9), r"lora_alpha was 8\.0, is 9\.0")):
        with pytest.raises(ConfigError, match=text):
            build(base, other).restore(saved, only_weights=True)


def test_a_save_appears_whole_is_never_overwritten_and_stays_in_its_folder(base: Path, saved: Path):
    model = build(base)
    with pytest.raises(ConfigError, match="exists already"):
        model.save("saved", saved.parent)
    for name in ("../x", "a/b", "..", ""):
        with pytest.raises(ConfigError, match="plain folder name"):
            model.save(name, saved.parent)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    (saved.parent / "torn").mkdir()
    with pytest.raises(DamagedError, match=r"trainer_state\.json"):
        model.resume_from_checkpoint(saved.parent / "torn")
    (saved.parent / "torn").rmdir()


def test_an_adapter_that_learnt_nothing_is_not_saved(base: Path, tmp_path: Path):
    model = build(base)
    train(model, 0, 1)
    with torch.no_grad():
        for name, parameter in model._group._worker.state().parameters.items():
            if "lora_B" in name:
                parameter.zero_()
    with pytest.raises(TrainingError, match="lora_B matrices are zero"):
        model.save("x", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_adapters_files_are_pefts_own_and_hold_no_local_path(base: Path, saved: Path):
    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), saved)
    loaded, written = peft.get_peft_model_state_dict(wrapped), load_file(saved / "adapter_model.safetensors")
    assert loaded.keys() == written.keys() and len(written) == 2 * 2 * 7
    assert all(torch.equal(loaded[name], written[name]) for name in written)
    for path in saved.glob("*.json"):
        assert str(base) not in path.read_text()
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] is None
