"""A model held in bf16 learns as one held in float32 does: values, gradients and checkpoints lose nothing to rounding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.tiny_models import batch, packed_row, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError
from twinkle_core.kernel.layers import decoder_layers
from twinkle_core.model import TransformersModel
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.half_gradients import HalfGradients

LORA = LoraConfig(rank=4, alpha=8, dropout=0.1)
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.05, "betas": (0.9, 0.95)}
FORMS = {"lora": ("default",), "full": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen3")


def build(
    folder: Path, adapters: tuple[str, ...], precision: str = "bf16", optimizer: str = "AdamW", **arguments: Any
) -> TransformersModel:
    model = TransformersModel(folder, seed=3, mixed_precision=precision)
    for name in adapters:
        model.add_adapter_to_model(name, LORA)
    for name in adapters or ("",):
        model.set_optimizer(optimizer, adapter_name=name, **(arguments or ADAMW))
    return model


def worker(model: TransformersModel) -> Any:
    return model._group._worker  # type: ignore[attr-defined]  # a LocalGroup


def state(model: TransformersModel) -> AdapterState:
    found: AdapterState = worker(model).state()
    return found


def gradients(model: TransformersModel) -> HalfGradients:
    found = state(model).gradients
    assert isinstance(found, HalfGradients)
    return found


def types(model: TransformersModel) -> set[torch.dtype]:
    return {parameter.dtype for parameter in worker(model).model.parameters()}


@pytest.mark.parametrize("form", FORMS)
def test_the_value_moves_as_a_float32_parameter_does_to_the_bit(folder: Path, form: str) -> None:
    model = build(folder, FORMS[form])
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=6, num_warmup_steps=1)
    assert types(model) == {torch.bfloat16}
    reference = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in model.get_state_dict().items()}
    adamw = torch.optim.AdamW(reference.values(), **ADAMW, fused=True)
    for step in range(5):
        model.forward_backward(batch(4, seed=step), micro_batch_size=1)
        model.clip_grad_norm(0.5)
        ours = gradients(model)
        assert ours.factor is not None
        for name, parameter in reference.items():
            parameter.grad = ours.gradient(name).float() * ours.factor
        norm = torch.linalg.vector_norm(torch.cat([parameter.grad.flatten() for parameter in reference.values()]))  # type: ignore[union-attr]
        assert float(norm) == pytest.approx(0.5, rel=1e-5)
        adamw.param_groups[0]["lr"] = model.get_lr()
        model.step()
        model.zero_grad()
        model.lr_step()
        adamw.step()
    for name, value in model.get_state_dict().items():
        np.testing.assert_array_equal(value, reference[name].detach().numpy(), err_msg=name)
        held = state(model).parameters[name]
        assert held.dtype == torch.bfloat16
        rounded = (held.float() - torch.from_numpy(value)).abs()
        assert (rounded <= torch.from_numpy(value).abs() * 2**-8).all(), "the model does not hold the rounding"
    assert any(bool((value != value.bfloat16()).any()) for value in reference.values()), "bf16 would have held all there is"


def test_micro_batches_are_added_up_in_float32(folder: Path) -> None:
    rows = batch(6)
    model = build(folder, ())
    one = {}
    for row in rows:
        model.forward_backward([row])
        for name in state(model).parameters:
            one.setdefault(name, []).append(gradients(model).gradient(name).clone())
        model.zero_grad()
    model.forward_backward(rows[:4], micro_batch_size=1)
    model.forward_backward(rows[4:], micro_batch_size=1)
    differs = 0
    for name, parts in one.items():
        assert {part.dtype for part in parts} == {torch.bfloat16}
        total, lossy = parts[0].float(), parts[0].clone()
        for part in parts[1:]:
            total, lossy = total + part.float(), lossy + part
        found = gradients(model).gradient(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, total), name
        differs += int((found != lossy.float()).sum())
    assert differs > 1000, "bf16 sums would have done"
    assert all(parameter.grad is None for parameter in state(model).parameters.values())


def test_a_parameter_without_a_gradient_decays_as_one_with_zeros(folder: Path) -> None:
    model = build(folder, ())
    before = model.get_state_dict()
    model.forward_backward([packed_row(5)])
    gradients(model).sums.pop("model.norm.weight")
    model.clip_grad_and_step()
    expected = before["model.norm.weight"] * np.float32(1 - ADAMW["lr"] * ADAMW["weight_decay"])
    np.testing.assert_array_equal(model.get_state_dict()["model.norm.weight"], expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_passes_between_float32_and_bf16(folder: Path, form: str, tmp_path: Path) -> None:
    def step(model: TransformersModel, number: int) -> None:
        model.forward_backward(batch(3, seed=number), seed=(1, number))
        model.clip_grad_and_step()

    half = build(folder, FORMS[form])
    for number in range(3):
        step(half, number)
    first = half.save("half", tmp_path)
    exact = build(folder, FORMS[form], "no")
    exact.resume_from_checkpoint(first)
    assert exact.cur_step == 3
    second = exact.save("exact", tmp_path)
    again = build(folder, FORMS[form])
    again.resume_from_checkpoint(second)
    third = again.save("again", tmp_path)
    files = sorted(path.name for path in first.iterdir() if path.name not in ("training.json", "config.json"))
    assert {"optimizer.safetensors", "rng.safetensors", "trainer_state.json"} < set(files)
    for other in (second, third):
        for name in files:
            assert (first / name).read_bytes() == (other / name).read_bytes(), f"{other.name}/{name}"
    for model in (half, again):
        step(model, 3)
    for name, value in half.get_state_dict().items():
        np.testing.assert_array_equal(again.get_state_dict()[name], value)
    step(exact, 3)
    moved = [np.abs(value - exact.get_state_dict()[name]).max() for name, value in half.get_state_dict().items()]
    assert max(moved) < 3 * ADAMW["lr"], "the same step, but for bf16's products"


def test_other_optimizers_train_float32_parameters_under_autocast_and_the_first_one_may_be_replaced(folder: Path) -> None:
    model = build(folder, ())
    model.forward_backward(batch(2))
    model.clip_grad_and_step()
    values = model.get_state_dict()
    model.set_optimizer("SGD", lr=0.1)
    assert types(model) == {torch.float32}
    for name, value in model.get_state_dict().items():
        np.testing.assert_array_equal(value, values[name])
    model.forward_backward(batch(2))
    assert model.clip_grad_and_step() > 0
    assert any((value != values[name]).any() for name, value in model.get_state_dict().items())
    model.set_optimizer("AdamW", **ADAMW)
    assert types(model) == {torch.bfloat16}
    for arguments in ({"amsgrad": True}, {"fused": False}, {"maximize": True}):
        model.set_optimizer("AdamW", **ADAMW, **arguments)
        assert types(model) == {torch.float32}, arguments


def test_two_adapters_each_keep_what_they_are_held_in(folder: Path) -> None:
    both = TransformersModel(folder, seed=3, mixed_precision="bf16")
    for name in ("first", "second"):
        both.add_adapter_to_model(name, LORA)
    both.set_optimizer("AdamW", adapter_name="first", **ADAMW)
    both.set_optimizer("SGD", adapter_name="second", lr=0.1)
    alone = build(folder, ("first",))
    for step in range(2):
        both.forward_backward(batch(3, seed=step), seed=(1, step), adapter_name="first")
        both.forward_backward(batch(3, seed=step), seed=(2, step), adapter_name="second")
        alone.forward_backward(batch(3, seed=step), seed=(1, step))
        for name in ("second", "first"):
            assert both.clip_grad_and_step(adapter_name=name) > 0
        alone.clip_grad_and_step()
    for name, value in both.get_state_dict(adapter_name="first").items():
        np.testing.assert_array_equal(value, alone.get_state_dict()[name])


def test_moments_in_bf16_are_asked_for_and_saved_as_float32(folder: Path, tmp_path: Path) -> None:
    arguments = {**ADAMW, "moments": "bf16"}
    model = build(folder, (), **arguments)
    model.forward_backward(batch(2))
    model.clip_grad_and_step()
    saved = model.save("moments", tmp_path)
    other = build(folder, (), **arguments)
    other.resume_from_checkpoint(saved)
    for one in (model, other):
        one.forward_backward(batch(2, seed=1), seed=(1,))
        one.clip_grad_and_step()
    for name, value in model.get_state_dict().items():
        np.testing.assert_array_equal(other.get_state_dict()[name], value)
    with pytest.raises(ConfigError, match="under other settings: optimizer was"):
        build(folder, ()).resume_from_checkpoint(saved)
    values = model.get_state_dict()
    with pytest.raises(ConfigError, match="does not move with beta2=0.999"):
        model.set_optimizer("AdamW", lr=1.0, moments="bf16")
    for name, value in model.get_state_dict().items():
        np.testing.assert_array_equal(value, values[name])
    with pytest.raises(ConfigError, match="no optimizer is set"):
        model.forward_backward(batch(1))


def test_wrong_arguments_are_refused_as_torch_does(folder: Path) -> None:
    model = TransformersModel(folder, mixed_precision="bf16")
    with pytest.raises(ConfigError, match="needs lr"):
        model.set_optimizer("AdamW")
    with pytest.raises(ConfigError, match="Invalid learning rate: -1"):
        model.set_optimizer("AdamW", lr=-1.0)
    with pytest.raises(ConfigError, match="has no argument speed"):
        model.set_optimizer("AdamW", lr=1.0, speed=3)
    assert types(model) == {torch.float32}


@pytest.mark.slow  # torch's tracing takes 20 s
def test_compiled_layers_take_part_and_may_be_compiled_anew_within_a_window(tmp_path: Path) -> None:
    """Compiled as far as no compiler is needed: torch traces the layers and their backward passes, and runs the operations."""
    torch._dynamo.reset()
    folder = save_model(tmp_path, "qwen3", num_hidden_layers=1)
    plain, compiled = (build(folder, ()) for _ in range(2))
    for layer in decoder_layers(worker(compiled).model):
        layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    for model in (plain, compiled):
        model.forward_backward(batch(3)[1:], micro_batch_size=1)
        model.forward_only(batch(1, seed=5))
        model.forward_backward(batch(1, seed=7))
        assert gradients(model).gradient("model.norm.weight").dtype == torch.float32
        model.clip_grad_and_step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1
    for name, value in plain.get_state_dict().items():
        np.testing.assert_array_equal(compiled.get_state_dict()[name], value)
