"""Several adapters in one model, each with its own course, and the forms of LoRA that peft knows."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import Qwen3MoeConfig

from tests.model.tiny_models import SIZES, batch, packed_row, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.model import TransformersModel

LORA = LoraConfig(rank=4, alpha=8, dropout=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "llama")


def two_adapters(folder: Path) -> TransformersModel:
    model = TransformersModel(folder, seed=3)
    model.add_adapter_to_model("first", LORA)
    model.add_adapter_to_model("second", LoraConfig(rank=2, alpha=4), gradient_accumulation_steps=2)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="first")
    model.set_optimizer("SGD", lr=0.1, momentum=0.9, adapter_name="second")
    return model


def step(model: TransformersModel, name: str | None, seed: int) -> tuple[float, float]:
    output = model.forward_backward(batch(2, seed=seed), seed=(9, seed), adapter_name=name)
    return output.loss, model.clip_grad_and_step(adapter_name=name)


def test_training_one_adapter_moves_no_bit_of_another_and_is_the_training_of_it_alone(folder: Path) -> None:
    both, alone = two_adapters(folder), TransformersModel(folder, seed=3)
    alone.add_adapter_to_model("first", LORA)
    alone.set_optimizer("AdamW", lr=1e-2)
    start = both.get_state_dict(adapter_name="second")
    base = {name: value.clone() for name, value in both._group._worker.model.named_parameters() if ".lora_" not in name}
    lines = [step(both, "first", seed) for seed in range(3)]
    for name, value in both.get_state_dict(adapter_name="second").items():
        np.testing.assert_array_equal(value, start[name])
    mixed = [(step(both, "second", 50 + seed), step(both, "first", seed))[1] for seed in range(3, 6)]
    assert lines + mixed == [step(alone, None, seed) for seed in range(6)]
    expected = alone.get_state_dict()
    for name, value in both.get_state_dict(adapter_name="first").items():
        np.testing.assert_array_equal(value, expected[name])
    assert both.get_step(adapter_name="first") == 6 and both.get_step(adapter_name="second") == 1, "b steps every second call"
    assert any((value != start[name]).any() for name, value in both.get_state_dict(adapter_name="second").items())
    for name, value in both._group._worker.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(value, base[name])


def test_an_adapter_must_be_named_where_there_are_several(folder: Path) -> None:
    model = two_adapters(folder)
    with pytest.raises(ConfigError, match="adapter_name is None; known: 'first', 'second'"):
        model.forward_backward(batch(1))
    with pytest.raises(ConfigError, match="adapter_name is 'c'; known: 'first', 'second'"):
        model.get_lr(adapter_name="c")
    with pytest.raises(ConfigError, match=r"adapter name 'x\.y'"):
        model.add_adapter_to_model("x.y", LORA)
    with pytest.raises(ConfigError, match="adapter name 'a'"):
        model.add_adapter_to_model("a", LORA)


def test_a_saved_adapter_is_added_with_its_weights_and_can_be_frozen(folder: Path, tmp_path: Path) -> None:
    model = two_adapters(folder)
    step(model, "first", 0)
    saved = model.save("first", tmp_path, adapter_name="first")
    other = TransformersModel(folder, seed=8)
    other.add_adapter_to_model("again", saved, is_trainable=False)
    expected = model.get_state_dict(adapter_name="first")
    for name, value in other.get_state_dict().items():
        np.testing.assert_array_equal(value, expected[name])
    assert other.forward_only(batch(2)) == model.forward_only(batch(2), adapter_name="first")
    with pytest.raises(ConfigError, match="is_trainable=False"):
        other.set_optimizer(lr=1.0)


def test_the_base_is_had_back_by_disabling_the_adapter(folder: Path) -> None:
    model = two_adapters(folder)
    for seed in range(3):
        step(model, "first", seed)
    rows = batch(3)
    base = TransformersModel(folder).forward_only(rows)
    assert model.forward_only(rows, adapter_name="first", disable_lora=True) == base
    assert model.forward_only(rows, adapter_name="second") == base, "B is zero, so it is the base too"
    assert model.forward_only(rows, adapter_name="first")[0]["loss_sum"] < base[0]["loss_sum"]


FORMS = {
    "rank pattern": (peft.LoraConfig(r=4, rank_pattern={"q_proj": 2}, target_modules=["q_proj", "v_proj"]), "lora_A"),
    "dora": (peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]), "lora_magnitude_vector"),
    "rslora": (peft.LoraConfig(r=4, use_rslora=True, target_modules=["q_proj"]), "lora_B"),
    "modules_to_save": (peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head"),
}


@pytest.mark.parametrize("form", FORMS)
def test_pefts_forms_of_lora_train_and_are_loaded_back_alike(folder: Path, form: str, tmp_path: Path) -> None:
    config, part = FORMS[form]
    model = TransformersModel(folder, seed=3)
    model.add_adapter_to_model("first", config)
    model.set_optimizer(lr=1e-2)
    start = model.get_state_dict()
    first = step(model, None, 0)[0]
    for _ in range(3):
        last = step(model, None, 0)[0]
    assert last < first
    moved = [name for name, value in model.get_state_dict().items() if (value != start[name]).any()]
    assert any(part in name for name in moved)
    saved = model.save("x", tmp_path)
    other = TransformersModel(folder, seed=8)
    other.add_adapter_to_model("first", saved)
    assert other.forward_only(batch(2)) == model.forward_only(batch(2))
    if form == "rank pattern":
        shapes = {name.split(".")[-3]: value.shape[0] for name, value in start.items() if "lora_A" in name}
        assert shapes == {"q_proj": 2, "v_proj": 4}


def test_lora_on_the_fused_experts_of_a_mixture(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "initializer_range": 0.2}
    model = TransformersModel(config=Qwen3MoeConfig(**sizes), seed=3)
    model.add_adapter_to_model("first", peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]))
    model.set_optimizer(lr=1e-2)
    names = model.get_state_dict().keys()
    assert names
    assert all("experts" in name for name in names)
    first = step(model, None, 0)[0]
    for _ in range(3):
        last = step(model, None, 0)[0]
    assert last < first
    assert model.save("x", tmp_path).is_dir()


@pytest.mark.parametrize("changes", [{"modules_to_save": ["lm_head"]}, {"target_modules": r".*(lm_head|q_proj)"}])
def test_an_adapter_of_a_tied_head_is_refused(changes: dict, tmp_path: Path) -> None:
    tied = save_model(tmp_path / "tied", "qwen2")
    with pytest.raises(ConfigError, match="tied embeddings"):
        TransformersModel(tied).add_adapter_to_model("first", peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **changes}))


def test_an_empty_or_all_zero_adapter_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = two_adapters(folder)
    step(model, "first", 0)
    saved = model.save("first", tmp_path, adapter_name="first")
    good = load_file(saved / "adapter_model.safetensors")
    for bad, text in (({}, "adapter is empty"), ({name: torch.zeros_like(value) for name, value in good.items()}, "are zero")):
        save_file(bad, saved / "adapter_model.safetensors")
        with pytest.raises(DataError, match=text):
            TransformersModel(folder).add_adapter_to_model("first", saved)


def test_a_row_that_no_adapter_has_learnt_from_is_an_error_for_each(folder: Path) -> None:
    model = two_adapters(folder)
    model.forward_backward([packed_row(5, learn_nothing=True)], adapter_name="first")
    model.forward_backward(batch(1), adapter_name="second")
    with pytest.raises(Exception, match="no supervised token before optimizer step 1"):
        model.clip_grad_and_step(adapter_name="first")
