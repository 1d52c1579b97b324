"""Schedules of torch.optim.lr_scheduler that are functions of the step (https://pytorch.org/docs/stable/optim.html).

Each gives the factor of the optimizer's rate at step k, from 0: what torch's has after k calls of its `step`. Arguments and their
defaults are torch's; `lr`, the optimizer's rate, is there where torch takes a rate in place of a factor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType


def step_lr(step: int, *, step_size: int, gamma: float = 0.1) -> float:
    """Example: step_size 30 has 1 up to step 29, 0.1 up to 59, 0.01 up to 89."""
    return float(gamma ** (step // step_size))


def multi_step_lr(step: int, *, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """Example: milestones 30 and 80 have 1 up to step 29, 0.1 up to 79, then 0.01."""
    return float(gamma ** bisect_right(sorted(milestones), step))


def constant_lr(step: int, *, factor: float = 1 / 3, total_iters: int = 5) -> float:
    """`factor` up to step `total_iters` - 1, then 1."""
    return factor if step < total_iters else 1.0


def linear_lr(step: int, *, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> float:
    """From one factor to the other in `total_iters` steps, then the second."""
    return start_factor + (end_factor - start_factor) * min(step, total_iters) / total_iters


def exponential_lr(step: int, *, gamma: float) -> float:
    """gamma to the power of the step."""
    return float(gamma**step)


def polynomial_lr(step: int, *, total_iters: int = 5, power: float = 1.0) -> float:
    """(1 - k / total_iters) to the power, then 0."""
    return float((1 - min(step, total_iters) / total_iters) ** power)


def cosine_annealing_lr(step: int, *, lr: float, T_max: int, eta_min: float = 0.0) -> float:
    """Half a wave from 1 to eta_min / lr in `T_max` steps, then up again: https://arxiv.org/abs/1608.03983, eq. 5, without restarts."""
    low = eta_min / lr
    return low + (1 - low) * (1 + math.cos(math.pi * step / T_max)) / 2


def cosine_annealing_warm_restarts(step: int, *, lr: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> float:
    """Half waves of T_0, T_0 T_mult, ... steps, each from 1 to eta_min / lr: https://arxiv.org/abs/1608.03983, eq. 5."""
    length, place = T_0, step
    while place >= length:
        place -= length
        length *= T_mult
        if T_mult == 1:
            place %= length
    return cosine_annealing_lr(place, lr=lr, T_max=length, eta_min=eta_min)


def lambda_lr(step: int, *, lr_lambda: Callable[[int], float]) -> float:
    """What the function gives for the step."""
    return float(lr_lambda(step))


def multiplicative_lr(step: int, *, lr_lambda: Callable[[int], float]) -> float:
    """Product of what the function gives for 1 to the step."""
    return float(math.prod(lr_lambda(k) for k in range(1, step + 1)))


TORCH_SCHEDULES: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "LambdaLR": lambda_lr,
        "MultiplicativeLR": multiplicative_lr,
        "StepLR": step_lr,
        "MultiStepLR": multi_step_lr,
        "ConstantLR": constant_lr,
        "LinearLR": linear_lr,
        "ExponentialLR": exponential_lr,
        "PolynomialLR": polynomial_lr,
        "CosineAnnealingLR": cosine_annealing_lr,
        "CosineAnnealingWarmRestarts": cosine_annealing_warm_restarts,
    }
)
REPLAYED = ("CyclicLR", "OneCycleLR")
"""Also functions of the step, found by running torch's own."""
NEED_SCHEDULERS = ("SequentialLR", "ChainedScheduler")
"""Made of other schedulers' objects, which hold an optimizer: a function of the step says the same."""
