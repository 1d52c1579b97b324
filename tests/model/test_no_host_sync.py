"""Between two readings of its numbers a training step asks the device for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.tiny_models import batch, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.model import TransformersModel
from twinkle_core.model.gradients import GradientBucket
from twinkle_core.model.micro_batch import by_data_rank, cut_rows

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")
"""Ways to get at a tensor's values, each of which waits for a device. On a CPU not all of them are seen by a dispatch mode."""


class _Scalars(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.seen.append("_local_scalar_dense")
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Every reading of a tensor by the host, while it lasts."""
    with _Scalars() as scalars, pytest.MonkeyPatch.context() as patch:

        def noted(name: str) -> Any:
            original = getattr(torch.Tensor, name)

            def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                scalars.seen.append(name)
                return original(tensor, *args, **kwargs)

            return read

        for name in READS:
            patch.setattr(torch.Tensor, name, noted(name))
        yield scalars.seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "qwen3")


def build(folder: Path, *, lora: bool, accumulation: int = 1, **settings: Any) -> TransformersModel:
    model = TransformersModel(folder, seed=3, **settings)
    if lora:
        model.add_adapter_to_model("default", LoraConfig(rank=4, dropout=0.1), gradient_accumulation_steps=accumulation)
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=100, num_warmup_steps=2)
    return model


@pytest.mark.parametrize("way", ["full", "lora", "accumulated", "loss", "metric"])
def test_steps_read_nothing_until_somebody_looks(folder: Path, way: str) -> None:
    model = build(folder, lora=way != "full", accumulation=2 if way == "accumulated" else 1)
    if way == "loss":
        model.set_loss("CrossEntropyLoss")
    if way == "metric":
        model.add_metric("TrainMetric")
        model.add_metric("LossMetric")
    model.forward_backward(batch(3), micro_batch_size=2)
    model.clip_grad_and_step()
    with host_reads() as seen:
        outputs, norms = [], []
        for step in range(4):
            outputs.append(model.forward_backward(batch(3, seed=step), micro_batch_size=2))
            norms.append(model.clip_grad_and_step(1e-3))
        assert seen == []
        losses = [output.loss for output in outputs]
        assert seen.count("tolist") == 1 and set(seen) <= {"tolist", "cpu"}, "all that was unread comes in one transfer"
        taken = [float(norm) for norm in norms if norm == norm]
        assert seen.count("tolist") == 1
    assert len(set(losses)) == 4 and all(1e-3 < norm < 1e3 for norm in taken) and len(taken) == (2 if way == "accumulated" else 4)


def test_a_float16_scaler_reads_one_number_a_step(folder: Path) -> None:
    model = build(folder, lora=True, mixed_precision="fp16")
    with host_reads() as seen:
        for step in range(3):
            model.forward_backward(batch(2, seed=step))
            model.clip_grad_and_step()
        assert seen.count("_local_scalar_dense") == 3


@pytest.mark.parametrize("max_norm", [0.05, 1e9, float("inf")])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_clipped_gradient_is_torchs(max_norm: float, norm_type: float) -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7))]
    bucket = GradientBucket(parameters, world_size=1)
    bucket.flat.copy_(torch.randn(22, generator=generator))
    mean = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for one, other in zip(mean, parameters, strict=True):
        one.grad = other.grad / 6.0
    expected = torch.nn.utils.clip_grad_norm_(mean, max_norm, norm_type)
    with host_reads() as seen:
        norm = bucket.normalise_and_clip(6.0, max_norm, norm_type)
    assert seen == []
    torch.testing.assert_close(norm.float(), expected)
    for one, other in zip(mean, parameters, strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    if max_norm == 0.05:
        assert bucket.flat.norm(norm_type) == pytest.approx(0.05, rel=1e-4)


def test_what_nobody_looks_at_takes_no_more_room_than_so_many_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 6
    for module in ("readings", "metrics", "ledger"):
        name = {"readings": "MOST_UNREAD", "metrics": "MOST_KEPT", "ledger": "MOST_KEPT"}[module]
        monkeypatch.setattr(f"twinkle_core.model.{module}.{name}", most if module != "ledger" else 2 * most)
    model = build(folder, lora=True)
    ledger = model._group._worker.state().ledger
    first = model.forward_backward(batch(1))
    for step in range(20):
        model.clip_grad_and_step()
        model.forward_backward(batch(1, seed=step))
        assert len(ledger._unread) <= most + 1 and len(ledger._values) <= 2 * most
        assert len(model._unread["default"]._numbers) <= most + 1 and len(model._metrics["default"]._train._kept) <= most
    assert first.loss_sum.is_read, "it was given its value when room was needed"
    assert model.calculate_metric()["loss"] > 1


def test_a_rank_that_is_never_asked_keeps_a_bounded_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_core.model.ledger.MOST_KEPT", 5)
    worker = build(folder, lora=True)._group._worker
    ledger = worker.state().ledger
    for ticket in range(40):
        ledger.note_norm(ticket, ticket, torch.tensor(float(ticket)), may_overflow=False)
        assert len(ledger._unread) < 5 and len(ledger._values) <= 5
    assert ledger.take(range(40)).values == {ticket: float(ticket) for ticket in range(35, 40)}


def test_a_worker_is_sent_the_micro_batches_of_its_data_rank_and_no_others() -> None:
    micro_batches = cut_rows(batch(5), 1, {"advantages": [0.0, 1.0, 2.0, 3.0, 4.0]})
    send = by_data_rank([(0, 2), (0, 2), (1, 2), (1, 2)])  # two data ranks of two workers each
    sent = [send(4, worker, (micro_batches, 5, "seed"), {})[0] for worker in range(4)]
    assert [[part.position for part in mine] for mine, _, _ in sent] == [[0, 2, 4], [0, 2, 4], [1, 3], [1, 3]]
    assert {tuple(rest) for _, *rest in sent} == {(5, "seed")}
    assert [part.loss_inputs["advantages"] for part in sent[2][0]] == [[1.0], [3.0]]
