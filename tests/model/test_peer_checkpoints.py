"""Checkpoints that peers wrote: PEFT's and HF Trainer's folders, and those of Twinkle's `save`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.model.tiny_models import batch, save_model
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.model import TransformersModel

LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen2")


def trained_by_trainer(base: Path, out: Path, lora: bool, **settings: Any) -> tuple[Path, torch.nn.Module]:
    """A folder of HF Trainer after three steps, and the model at the end of it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if lora:
        model = peft.get_peft_model(model, LORA)
    rows = [{"input_ids": list(range(3 + n, 11 + n)), "labels": list(range(3 + n, 11 + n))} for n in range(6)]
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_steps=STEPS,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return out / f"checkpoint-{STEPS}", model


def build(base: Path, lora: bool, precision: str = "no", **settings: Any) -> TransformersModel:
    model = TransformersModel(base, seed=3, mixed_precision=precision)
    if lora:
        model.add_adapter_to_model("default", LORA)
    model.set_optimizer("AdamW", lr=1e-2, **settings)
    return model


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_trainers_folder_gives_weights_moments_and_step(base: Path, lora: bool, tmp_path: Path) -> None:
    folder, theirs = trained_by_trainer(base, tmp_path, lora, weight_decay=0.1)
    model = build(base, lora)
    model.load(folder, load_optimizer=True)
    assert model.cur_step == STEPS
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    state = model._group._worker.state()
    norms = sorted(float(entry["exp_avg"].norm()) for entry in saved["state"].values())
    found = {name: value for name, value in state.optimizer.tensors().items() if name.endswith(".exp_avg")}
    assert sorted(float(value.norm()) for value in found.values()) == pytest.approx(norms, rel=1e-6)
    rows = batch(2)
    ids = torch.from_numpy(rows[0].input_ids[None].astype(np.int64))
    with torch.no_grad():
        logits = theirs.eval()(input_ids=ids).logits[0].log_softmax(-1)
    learnt = torch.from_numpy(rows[0].labels.astype(np.int64))
    keep = learnt >= 0
    expected = logits[keep].gather(1, learnt[keep][:, None])[:, 0].numpy()
    assert len(rows[0].seq_lens) == 1
    np.testing.assert_allclose(model.forward_only(rows[:1], return_logps=True)[0]["logps"], expected, rtol=1e-4, atol=1e-5)


def test_the_moments_go_to_the_parameters_they_belong_to(base: Path, tmp_path: Path) -> None:
    """One more step, of the same gradient, by both."""
    folder, theirs = trained_by_trainer(base, tmp_path, False, weight_decay=0.1)
    model = build(base, False)
    model.load(folder, load_optimizer=True)
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    decayed = len(saved["param_groups"][0]["params"])
    names = [name for name, value in theirs.named_parameters() if value.ndim >= 2]
    names += [name for name, value in theirs.named_parameters() if value.ndim < 2]
    assert decayed == sum(value.ndim >= 2 for value in theirs.parameters()) < len(names)
    found = model._group._worker.state().optimizer.tensors()
    for number, name in enumerate(names):
        torch.testing.assert_close(found[f"{name}.exp_avg_sq"], saved["state"][number]["exp_avg_sq"], rtol=0, atol=0)


def test_the_number_of_rows_consumed_is_not_made_up(base: Path, tmp_path: Path) -> None:
    folder, _ = trained_by_trainer(base, tmp_path, True)
    with pytest.raises(ConfigError, match="has no cur_step, consumed_train_samples"):
        build(base, True).resume_from_checkpoint(folder)


def twinkles(base: Path, tmp_path: Path, model: TransformersModel) -> Path:
    """A folder as Twinkle's `save(save_optimizer=True)` writes it: one group, numbered by the model's order, and 3.1's state file."""
    saved = model.save("ours", tmp_path, consumed_train_samples=24)
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes((saved / name).read_bytes())
    state = model._group._worker.state()
    tensors = state.optimizer.tensors()
    entries = {
        number: {key: tensors[f"{name}.{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")}
        for number, name in enumerate(state.model_order)
    }
    groups = [{"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(entries)}]
    torch.save({"state": entries, "param_groups": groups}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(
        json.dumps({"checkpoint_version": 1, "cur_step": 6, "gradient_accumulation_steps": 2, "consumed_train_samples": 24})
    )
    return folder


def train(model: TransformersModel, start: int, stop: int) -> list[tuple[float, float]]:
    lines = []
    for step in range(start, stop):
        loss = model.forward_backward(batch(3, seed=step), seed=(9, step)).loss
        lines.append((loss, model.clip_grad_and_step()))
    return lines


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_twinkle_folder_is_resumed_and_counts_optimizer_steps(base: Path, tmp_path: Path, precision: str) -> None:
    model = build(base, True, precision)
    train(model, 0, 3)
    folder = twinkles(base, tmp_path, model)
    other = build(base, True, precision)
    state = other.resume_from_checkpoint(folder)
    assert state == {"cur_step": 3, "consumed_train_samples": 24, "gradient_accumulation_steps": 2}
    assert train(other, 3, 5) == train(model, 3, 5)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this ran",))


def test_a_pickle_that_holds_more_than_tensors_is_refused_unread(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(base, True)
    train(model, 0, 1)
    folder = twinkles(base, tmp_path, model)
    torch.save({"state": Evil()}, folder / "optimizer.pt")
    other = build(base, True)
    before = other.get_state_dict()
    with pytest.raises(DataError, match="holds more than tensors .* moments, step and schedule are left out"):
        other.load(folder, load_optimizer=True)
    assert "this ran" not in capsys.readouterr().out
    for name, value in other.get_state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    other.load("theirs", tmp_path)
    for name, value in other.get_state_dict().items():
        np.testing.assert_array_equal(value, model.get_state_dict()[name])
    (folder / "adapter_model.safetensors").unlink()
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(DataError, match=r"adapter_model\.bin is a pickle, which may run code"):
        other.load(folder)
    with pytest.raises(ConfigError, match="does not exist here"):
        other.load("nowhere", tmp_path)


def test_shards_and_half_precision_and_a_second_copy_of_a_tied_head_are_read(base: Path, tmp_path: Path) -> None:
    model = build(base, False)
    train(model, 0, 2)
    tensors = load_file(model.save("ours", tmp_path) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    half = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
    names = sorted(half)
    folder = tmp_path / "sharded"
    folder.mkdir()
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: half[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    other = build(base, False)
    other.load(folder)
    for name, value in other.get_state_dict().items():
        np.testing.assert_array_equal(value, half[name].float().numpy())
    half["lm_head.weight"] = half["lm_head.weight"] * 2
    save_file({name: half[name] for name in names[:7]}, folder / "model-1.safetensors")
    with pytest.raises(DataError, match="are one matrix in this model, but two different ones"):
        other.load(folder)
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="names files outside its folder"):
        other.load(folder)
