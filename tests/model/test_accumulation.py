"""Windows of accumulation: the loop calls step for each batch, and every n-th call takes it."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.model.tiny_models import batch, packed_row, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.model import TransformersModel
from twinkle_core.model.forward import Forward

LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen3")


def build(folder: Path, accumulation: int = 1) -> TransformersModel:
    model = TransformersModel(folder, seed=3)
    model.add_adapter_to_model("default", LORA, gradient_accumulation_steps=accumulation)
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("LinearWarmupScheduler", num_training_steps=10, num_warmup_steps=1)
    return model


def same(one: TransformersModel, other: TransformersModel, **tolerance: float) -> None:
    expected = other.get_state_dict()
    for name, value in one.get_state_dict().items():
        np.testing.assert_allclose(value, expected[name], err_msg=name, **tolerance)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_step_is_taken_at_every_nth_call_from_the_first_window_on(folder: Path, accumulation: int) -> None:
    model = build(folder, accumulation)
    taken = []
    for call in range(7):
        model.forward_backward(batch(1, seed=call))
        norm = model.clip_grad_and_step()
        taken.append(not math.isnan(norm))
    assert taken == [(call + 1) % accumulation == 0 for call in range(7)]
    assert model.cur_step == 7 // accumulation, "the schedule counts steps"
    assert model.get_lr() == pytest.approx(1e-2 * (1 - (model.cur_step - 1) / 9 if model.cur_step else 1), rel=1e-6)


def test_a_window_of_calls_is_one_batch(folder: Path) -> None:
    rows = [*batch(4), *batch(2, seed=9)]
    windows, whole = build(folder, 3), build(folder)
    for start in range(0, 6, 2):
        windows.forward_backward(rows[start : start + 2])
        windows.clip_grad_and_step()
    whole.forward_backward(rows, micro_batch_size=3)
    whole.clip_grad_and_step()
    assert windows.cur_step == whole.cur_step == 1
    moments, expected = (model._group._worker.state().optimizer.tensors() for model in (windows, whole))
    scale = max(float(value.abs().max()) for name, value in expected.items() if name.endswith(".exp_avg"))
    for name, value in expected.items():
        np.testing.assert_allclose(moments[name], value, rtol=1e-5, atol=1e-6 * scale, err_msg=name)


def test_a_number_given_to_the_step_stands_over_the_adapters(folder: Path) -> None:
    model = build(folder)
    for call in range(4):
        model.forward_backward(batch(1, seed=call))
        model.clip_grad_and_step(gradient_accumulation_steps=2)
    assert model.cur_step == 2
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 0"):
        model.clip_grad_and_step(gradient_accumulation_steps=0)


def test_the_short_last_window_is_stepped_by_finish_window_and_by_save_and_by_nothing_twice(folder: Path, tmp_path: Path) -> None:
    by_hand, by_save, by_name = build(folder), build(folder, 2), build(folder, 2)
    rows = [batch(1, seed=call) for call in range(3)]
    by_hand.forward_backward(rows[0])
    by_hand.forward_backward(rows[1])
    by_hand.clip_grad_and_step(0.5)
    by_hand.forward_backward(rows[2])
    by_hand.clip_grad_and_step(0.5)
    for model in (by_save, by_name):
        for row in rows:
            model.forward_backward(row)
            model.clip_grad_and_step(0.5)
        assert model.cur_step == 1
    assert by_name.finish_window() == 2 == by_name.finish_window()
    saved = by_save.save("last", tmp_path)
    assert by_save.cur_step == 2
    assert '"cur_step": 2' in (saved / "trainer_state.json").read_text()
    assert '"gradient_accumulation_steps": 2' in (saved / "trainer_state.json").read_text()
    for model in (by_save, by_name):
        same(model, by_hand, rtol=0, atol=0)


def test_a_short_window_past_the_schedules_end_does_not_stand_in_the_way_of_saving(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TransformersModel(folder)
    model.add_adapter_to_model("default", LORA, gradient_accumulation_steps=2)
    model.set_optimizer(lr=1e-2)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=1)
    for call in range(3):
        model.forward_backward(batch(1, seed=call))
        model.clip_grad_and_step()
    before = model.get_state_dict()
    model.save("x", tmp_path)
    assert "1 forward_backward calls after step 1 change nothing: the schedule is over" in caplog.text
    for name, value in model.get_state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_parts_of_a_step_are_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch, is_fused: bool) -> None:
    """To the bit where both go through logits; the plain loss is made without them, in other last digits."""
    if not is_fused:
        monkeypatch.setattr(Forward, "can_fuse", lambda _self: False)
    tolerance = 1e-6 if is_fused else 0.0
    parts, whole = build(folder, 2), build(folder, 2)
    for call in range(5):
        rows = batch(2, seed=call)
        answers = parts.forward(rows, seed=(1, call))
        loss = parts.calculate_loss()
        parts.backward()
        norm = parts.clip_grad_norm(0.5)
        stepped = parts.step()
        parts.zero_grad()
        parts.lr_step()
        output = whole.forward_backward(rows, seed=(1, call))
        expected = whole.clip_grad_and_step(0.5)
        assert loss == pytest.approx(output.loss, rel=tolerance, abs=0)
        assert stepped == (norm is not None) == (call % 2 == 1)
        assert math.isnan(expected) or norm == pytest.approx(float(expected), rel=tolerance, abs=0)
        assert parts.get_lr() == whole.get_lr() and parts.cur_step == whole.cur_step
        assert [-float(answer["logps"].sum()) for answer in answers] == pytest.approx([answer["loss_sum"] for answer in answers])
    same(parts, whole, rtol=0, atol=1e-4 if is_fused else 0)  # an update is 1e-2


def test_a_step_without_clipping_divides_all_the_same_and_lr_waits_for_lr_step(folder: Path) -> None:
    one, other = build(folder), build(folder)
    for model, clipped in ((one, False), (other, True)):
        model.forward_backward(batch(2))
        if clipped:
            model.clip_grad_norm(1e9)
        assert model.step()
        model.zero_grad()
    same(one, other, rtol=0, atol=0)
    for model, moves in ((one, 2), (other, 0)):
        model.forward_backward(batch(2))
        assert model.step()
        for _ in range(moves):
            model.lr_step()
    assert other.get_lr() == 1e-2, "the schedule never moved"
    assert one.get_lr() == pytest.approx(1e-2), "two steps and two moves, of which the second had no step behind it"
    one.zero_grad()
    one.forward_backward(batch(2))
    one.step()
    one.lr_step()
    assert one.get_lr() == pytest.approx(1e-2 * 8 / 9)


@pytest.mark.parametrize("method", ["clip_grad_norm", "step", "clip_grad_and_step"])
def test_nothing_accumulated_is_an_error_not_a_zero(folder: Path, method: str) -> None:
    model = build(folder, 2)
    with pytest.raises(TrainingError, match="no supervised token before optimizer step 1"):
        getattr(model, method)()
    for _ in range(2):
        model.forward_backward([packed_row(6, learn_nothing=True)])
    with pytest.raises(TrainingError, match="no supervised token before optimizer step 1: every label is -100"):
        getattr(model, method)()


def test_parts_out_of_order_are_refused(folder: Path) -> None:
    model = build(folder)
    with pytest.raises(ConfigError, match="call forward first"):
        model.backward()
    model.forward(batch(1))
    with pytest.raises(ConfigError, match="call calculate_loss first"):
        model.backward()
    model.calculate_loss()
    model.backward()
    model.clip_grad_norm()
    with pytest.raises(ConfigError, match="divided and clipped already"):
        model.clip_grad_norm()
