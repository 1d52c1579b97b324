"""Gradients of bf16 parameters on two ranks: sums in float32, as one rank's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.ranks import run_ranks
from twinkle_core.model.half_gradients import HalfGradients


def parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for name, size in (("a", 5), ("b", 3), ("unused", 2))}


def backward(owned: dict[str, torch.nn.Parameter], number: int) -> None:
    """What rank or micro-batch `number` learns."""
    loss = (owned["a"] * (1.0 + number / 100)).sum()
    if number:  # rank 0 has no gradient for b
        loss = loss + (owned["b"] * 256.0).sum()
    loss.float().backward()


def found(gradients: HalfGradients, weight: float) -> tuple[float, float, float, dict[str, list[float]]]:
    norm = gradients.normalise_and_clip(weight, 1.0)
    assert gradients.factor is not None
    return weight, float(norm), float(gradients.factor), {name: gradients.gradient(name).tolist() for name in parameters()}


def on_a_rank(rank: int) -> Any:
    owned = parameters()
    gradients = HalfGradients(owned, 2)
    backward(owned, rank)
    gradients.loss_weight = 2.0 + rank
    return found(gradients, gradients.reduce())


@pytest.mark.slow  # starts processes
def test_two_ranks_have_the_sums_of_one(tmp_path: Path) -> None:
    owned = parameters()
    gradients = HalfGradients(owned, 1)
    for number in range(2):
        backward(owned, number)
        gradients.loss_weight += 2.0 + number
    alone = found(gradients, gradients.reduce())
    assert alone[0] == 5.0
    assert alone[3]["unused"] == [0.0, 0.0]
    for there in run_ranks(2, on_a_rank, tmp_path):
        assert there == alone


def test_the_norm_and_the_factor_by_hand() -> None:
    owned = {"p": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), "q": torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))}
    gradients = HalfGradients(owned, 1)
    (owned["p"] * torch.tensor([6.0, 0.0], dtype=torch.bfloat16)).sum().backward()
    (owned["q"] * 8.0).sum().backward()
    # The vector (6, 0, 8) has norm 10; over a weight of 4 it is 2.5, and a largest norm of 0.5 divides by 5 once more.
    assert float(gradients.normalise_and_clip(4.0, 0.5)) == 2.5
    assert float(gradients.factor) == pytest.approx(1 / 20, rel=1e-5)  # type: ignore[arg-type]
    assert float(gradients.normalise_and_clip(4.0, 3.0)) == 2.5
    assert float(gradients.factor) == 0.25  # type: ignore[arg-type]
    assert float(gradients.normalise_and_clip(4.0, 3.0, float("inf"))) == 2.0
    gradients.zero()
    assert float(gradients.normalise_and_clip(4.0, 3.0)) == 0.0
    gradients.close()
    (owned["q"] * 8.0).sum().backward()
    assert owned["q"].grad is not None, "closed, it takes nothing"


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    owned = {"p": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))}
    gradients = HalfGradients(owned, 1)
    (owned["p"] * float("inf")).sum().backward()
    assert not torch.tensor(float(gradients.normalise_and_clip(1.0, 1.0))).isfinite()
