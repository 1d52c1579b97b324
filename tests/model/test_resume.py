"""Three ways: uninterrupted equals resumed to the bit, and a resume of the weights alone is neither."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.tiny_models import batch, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.model import TransformersModel
from twinkle_core.model.grad_scaler import LossScaler


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model is set up."""

    adapters: tuple[str, ...] = ("first",)
    optimizer: str | type = "AdamW"
    arguments: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.01})
    mixed_precision: str = "no"
    grad_scaler_config: dict[str, Any] = field(default_factory=dict)


class Momentum(torch.optim.Optimizer):
    """A user's own: SGD with a velocity, and a plain number in its state."""

    def __init__(self, params: Any, lr: float, friction: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "friction": friction})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["friction"]).add_(parameter.grad)
                parameter.sub_(velocity, alpha=group["lr"] / state["count"])


SKIPPING = {"init_scale": 2.0**17, "growth_interval": 1}
"""Overflows now and then: it grows after every step."""
FORMS = {
    "lora": Form(),
    "full": Form(adapters=()),
    "two adapters": Form(adapters=("first", "second")),
    "fp16": Form(mixed_precision="fp16", grad_scaler_config=SKIPPING),
    "fp16 full": Form(adapters=(), mixed_precision="fp16", grad_scaler_config={"growth_interval": 2}),
    "bf16": Form(mixed_precision="bf16"),
    "Adagrad": Form(optimizer="Adagrad", arguments={"lr": 1e-2}),
    "Adafactor": Form(optimizer="Adafactor", arguments={"lr": 1e-2}),
    "SGD": Form(optimizer="SGD", arguments={"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "the user's own": Form(optimizer=Momentum, arguments={"lr": 0.1}),
}
LORA = LoraConfig(rank=4, alpha=8, dropout=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen2")


def build(folder: Path, form: Form) -> TransformersModel:
    model = TransformersModel(folder, seed=3, mixed_precision=form.mixed_precision, grad_scaler_config=form.grad_scaler_config)
    for name in form.adapters:
        model.add_adapter_to_model(name, LORA)
    for name in form.adapters or ("",):
        model.set_optimizer(form.optimizer, adapter_name=name, **form.arguments)
        model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=20, num_warmup_steps=2, adapter_name=name)
    return model


def train(model: TransformersModel, form: Form, start: int, stop: int) -> list[str]:
    lines: list[str] = []
    for turn in range(start, stop):
        for place, name in enumerate(form.adapters or ("",)):
            loss = model.forward_backward(batch(3, seed=turn + 40 * place), micro_batch_size=2, adapter_name=name).loss
            lines.append(
                repr((loss, model.get_lr(adapter_name=name), model.clip_grad_and_step(adapter_name=name)))
            )  # NaN equals itself here
    return lines


def weights(model: TransformersModel, form: Form) -> dict[str, np.ndarray]:
    return {f"{name}/{key}": value for name in form.adapters or ("",) for key, value in model.get_state_dict(adapter_name=name).items()}


@pytest.mark.parametrize("name", FORMS)
def test_uninterrupted_is_resumed_and_is_not_weights_only(folder: Path, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    whole = build(folder, form)
    train(whole, form, 0, 3)
    saved = {adapter: whole.save(adapter or "full", tmp_path, adapter_name=adapter) for adapter in form.adapters or ("",)}
    lines = train(whole, form, 3, 6)
    end = weights(whole, form)

    resumed, weights_only = build(folder, form), build(folder, form)
    for adapter, path in saved.items():
        resumed.resume_from_checkpoint(path, adapter_name=adapter)
        weights_only.resume_from_checkpoint(path, adapter_name=adapter, resume_only_model=True)
    assert train(resumed, form, 3, 6) == lines
    assert train(weights_only, form, 3, 6) != lines
    for key, value in weights(resumed, form).items():
        np.testing.assert_array_equal(value, end[key], err_msg=key)
    assert any((value != end[key]).any() for key, value in weights(weights_only, form).items())
    if name == "fp16":
        assert 0 < whole.cur_step < 6, "some steps were skipped, some taken"


def test_an_overflow_skips_the_step_and_neither_the_weights_nor_the_schedule_move(folder: Path) -> None:
    form = Form(mixed_precision="fp16", grad_scaler_config={"init_scale": 2.0**40})
    model = build(folder, form)
    before, rate = weights(model, form), model.get_lr()
    model.forward_backward(batch(3))
    norm = model.clip_grad_and_step()
    assert not np.isfinite(norm)
    facts = model.calculate_metric()
    assert facts["num_skipped_steps"] == 1 and facts["loss_scale"] == 2.0**39
    assert model.cur_step == 0 and model.get_lr() == rate
    for key, value in weights(model, form).items():
        np.testing.assert_array_equal(value, before[key])
    skipped = 1
    while not np.isfinite(norm):
        model.forward_backward(batch(3))
        norm = model.clip_grad_and_step()
        skipped += not np.isfinite(norm)
    assert model.cur_step == 1 and model.get_lr() == 2 * rate, "the warm-up's second step"
    assert model.calculate_metric()["num_skipped_steps"] == skipped > 3
    assert any((value != before[key]).any() for key, value in weights(model, form).items())


def test_fp16_comes_near_float32(folder: Path, tmp_path: Path) -> None:
    exact, half = build(folder, FORMS["lora"]), build(folder, Form(mixed_precision="fp16"))
    for model in (exact, half):
        model.loss = model.forward_backward(batch(3)).loss  # type: ignore[attr-defined]
        model.norm = model.clip_grad_and_step()  # type: ignore[attr-defined]
    assert half.loss == pytest.approx(exact.loss, rel=1e-2)
    assert half.norm == pytest.approx(exact.norm, rel=2e-2)


def test_the_scale_follows_torchs_grad_scaler() -> None:
    ours = LossScaler(init_scale=64.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for is_finite in (True, False, True, True, True, True, False, False, True, True, True, True, True, True, True):
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([1.0 if is_finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_finite=is_finite)
        assert ours.scale == theirs.get_scale()
    assert ours.num_skipped == 3
    ours.scale = 2.0**-14
    with pytest.raises(TrainingError, match="not finite at a loss scale"):
        ours.update(is_finite=False)
    with pytest.raises(ConfigError, match="backoff_factor 2"):
        LossScaler(backoff_factor=2.0)


def test_a_scaler_belongs_to_fp16_and_to_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a gradient scaler is for 'fp16' alone"):
        build(folder, FORMS["lora"]).set_grad_scaler(init_scale=2.0)
    half = build(folder, Form(mixed_precision="fp16"))
    half.set_grad_scaler(init_scale=8.0)
    assert half.calculate_metric()["loss_scale"] == 8.0
    half.forward_backward(batch(1))
    half.clip_grad_and_step()
    saved = half.save("half", tmp_path)
    with pytest.raises(ConfigError, match="saved with a gradient scaler"):
        build(folder, FORMS["lora"]).restore(saved)


def test_weights_alone_are_saved_without_what_a_resume_needs_and_say_so(folder: Path, tmp_path: Path) -> None:
    model = build(folder, FORMS["lora"])
    train(model, FORMS["lora"], 0, 2)
    assert model.save(None, tmp_path, interval=3) is None
    saved = model.save(None, tmp_path, interval=2, save_optimizer=False, consumed_train_samples=6)
    assert saved.name == "checkpoint-step-2"
    names = {path.name for path in saved.iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json"}
    other = build(folder, FORMS["lora"])
    with pytest.raises(Exception, match=r"training\.json cannot be read"):
        other.resume_from_checkpoint(saved)
    state = other.resume_from_checkpoint(saved, resume_only_model=True)
    assert state == {"cur_step": 2, "consumed_train_samples": 6, "gradient_accumulation_steps": 1}
    assert other.forward_only(batch(2)) == model.forward_only(batch(2))


def test_a_fully_trained_folder_is_a_model_that_transformers_and_a_new_run_load(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    form = FORMS["full"]
    model = build(folder, form)
    train(model, form, 0, 2)
    saved = model.save("full", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.config.tie_word_embeddings
    expected = model.get_state_dict()
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value.detach().numpy(), expected[name])
    again = build(saved, form)
    again.resume_from_checkpoint(saved)
    assert train(again, form, 2, 4) == train(model, form, 2, 4)
