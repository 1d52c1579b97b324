"""Each family in the forms that a GPU's step takes: held in bf16, and with the loss where the head is."""

import pytest
import torch

from tests.families.checks import ALL_LINEAR, family_folder, rows
from tests.families.families import FAMILIES
from twinkle_core.kernel.fused_head import has_plain_head
from twinkle_core.model import TransformersModel, forward

SAMPLE = ("qwen3", "qwen3_moe", "qwen3_5", "gpt_oss")
NAMES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in FAMILIES]
CHANGED = {"gemma2", "gemma4"}
"""Families that do something to their logits after the head."""
KEPT = {"gpt_oss"}
"""Families of which transformers keeps parts in float32: they are trained in float32 under autocast."""


def build(name: str, precision: str, lora: bool) -> TransformersModel:
    model = TransformersModel(family_folder(name).name, seed=3, mixed_precision=precision)
    if lora:
        model.add_adapter_to_model("default", ALL_LINEAR)
    model.set_optimizer("AdamW", lr=1e-3)
    return model


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_a_family_held_in_bf16_computes_about_the_float32_loss_and_learns(name: str, lora: bool) -> None:
    exact = build(name, "no", lora).forward_backward(rows()).loss
    model = build(name, "bf16", lora)
    live = model._group._worker  # type: ignore[attr-defined]
    kinds = {parameter.dtype for parameter in live.model.parameters()}
    assert torch.float32 in kinds if name in KEPT else kinds == {torch.bfloat16}
    losses = []
    for step in range(3):
        losses.append(model.forward_backward(rows(), seed=(1, step)).loss)
        assert model.clip_grad_and_step() > 0
    assert losses[0] == pytest.approx(exact, rel=0.05)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_at_the_head_is_that_of_the_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> tuple[float, float, bool]:
        model = build(name, "no", lora=True)
        fused: bool = model._group._worker.forwards.can_fuse()  # type: ignore[attr-defined]
        return float(model.forward_backward(rows()).loss), float(model.clip_grad_and_step()), fused

    with monkeypatch.context() as patch:
        patch.setattr(forward.Forward, "can_fuse", lambda _self: False)
        *plain, fused = step()
        assert not fused
    *found, fused = step()
    assert fused == (name not in CHANGED)
    assert found == pytest.approx(plain, rel=1e-5)
    assert has_plain_head(build(name, "no", lora=True)._group._worker.model) == fused  # type: ignore[attr-defined]
