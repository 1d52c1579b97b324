"""On a GPU: a step of `TransformersModel` waits for nothing between two readings. Run by hand: python -m pytest tests/gpu -m gpu"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.model.tiny_models import batch, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.model import TransformersModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("lora", [True, False])
def test_steps_wait_for_nothing_until_somebody_looks(lora: bool, tmp_path: Path) -> None:
    model = TransformersModel(save_model(tmp_path / "model", "qwen3"), seed=3)
    if lora:
        model.add_adapter_to_model("default", LoraConfig(rank=4, dropout=0.1))
    model.set_optimizer("AdamW", lr=1e-3)
    for step in range(3):  # kernels are loaded, layers compiled
        model.forward_backward(batch(3, seed=step), micro_batch_size=2)
        model.clip_grad_and_step()
    with no_waiting():
        outputs, norms = [], []
        for step in range(3):
            outputs.append(model.forward_backward(batch(3, seed=step), micro_batch_size=2))
            norms.append(model.clip_grad_and_step())
    assert all(output.loss > 0 for output in outputs) and all(norm > 0 for norm in norms)
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        float(model.forward_backward(batch(1)).loss_sum)
