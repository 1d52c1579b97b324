"""Schedules by the names of torch and transformers give the numbers of torch and transformers."""

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from twinkle_core.scheduler import KNOWN, MetricSchedule, build_schedule, lr_factor

LR, STEPS = 0.02, 60


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LR)


def rates(make: Callable[[torch.optim.Optimizer], Any], steps: int = STEPS) -> list[float]:
    """The optimizer's rate before each of its steps."""
    owner = optimizer()
    scheduler, found = make(owner), []
    for _ in range(steps):
        found.append(owner.param_groups[0]["lr"])
        owner.step()
        scheduler.step()
    return found


def ours(scheduler: Any, arguments: dict[str, Any], steps: int = STEPS) -> list[float]:
    schedule = build_schedule(scheduler, arguments, lr=LR)
    backwards = [LR * schedule.factor(step) for step in reversed(range(steps))]  # any order: a function of the step
    return backwards[::-1]


TORCH: list[tuple[str, dict[str, Any]]] = [
    ("LambdaLR", {"lr_lambda": lambda step: 0.95**step}),
    ("MultiplicativeLR", {"lr_lambda": lambda step: 1 - 1 / (step + 3)}),
    ("StepLR", {"step_size": 7}),
    ("StepLR", {"step_size": 1, "gamma": 0.9}),
    ("MultiStepLR", {"milestones": [5, 20, 20, 40], "gamma": 0.5}),
    ("ConstantLR", {}),
    ("ConstantLR", {"factor": 0.5, "total_iters": 13}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 0.1, "end_factor": 0.7, "total_iters": 20}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("PolynomialLR", {}),
    ("PolynomialLR", {"total_iters": 50, "power": 2.5}),
    ("CosineAnnealingLR", {"T_max": 40}),
    ("CosineAnnealingLR", {"T_max": 25, "eta_min": 0.005}),
    ("CosineAnnealingWarmRestarts", {"T_0": 9}),
    ("CosineAnnealingWarmRestarts", {"T_0": 5, "T_mult": 2, "eta_min": 0.001}),
    ("CosineAnnealingWarmRestarts", {"T_0": 1, "T_mult": 3}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.03, "step_size_up": 8, "mode": "triangular2", "cycle_momentum": False}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": STEPS + 1, "cycle_momentum": False}),
]


@pytest.mark.parametrize(("name", "arguments"), TORCH)
def test_torchs_numbers(name: str, arguments: dict[str, Any]) -> None:
    expected = rates(lambda owner: getattr(torch.optim.lr_scheduler, name)(owner, **arguments))
    assert ours(name, arguments) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len({round(rate, 9) for rate in expected}) > 1, "a constant would do"


TRANSFORMERS: list[tuple[str, dict[str, Any]]] = [
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"lr_end": 0.001, "power": 2.0}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 11}),
    ("cosine_with_min_lr", {"min_lr": 0.002}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.3}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.3}),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.002, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 15, "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 10, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "warmup_type": "cosine", "decay_type": "linear"}),
]


@pytest.mark.parametrize(("name", "arguments"), TRANSFORMERS)
@pytest.mark.parametrize("num_warmup_steps", [0, 6])
def test_transformers_numbers(name: str, arguments: dict[str, Any], num_warmup_steps: int) -> None:
    def make(owner: torch.optim.Optimizer) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.get_scheduler(name, owner, num_warmup_steps, 50, dict(arguments))

    given = dict(arguments, num_warmup_steps=num_warmup_steps)
    if name not in ("constant_with_warmup", "inverse_sqrt"):
        given["num_training_steps"] = 50
    steps = 50 if name == "cosine_warmup_with_min_lr" else STEPS
    assert ours(name, given, steps) == pytest.approx(rates(make, steps), rel=1e-9, abs=1e-12)


def test_every_name_of_both_is_known_or_refused_with_the_reason() -> None:
    theirs = {str(name.value) for name in transformers.SchedulerType}
    assert theirs <= set(KNOWN)
    assert ours("constant", {}) == [LR] * STEPS
    names = {name for name in vars(torch.optim.lr_scheduler) if name.endswith("LR") or name in torch.optim.lr_scheduler.__all__}
    left = names - set(KNOWN) - {"LRScheduler"}
    assert left == {"SequentialLR", "ChainedScheduler"}
    for name in left:
        with pytest.raises(ValueError, match=f"{name} is made of schedulers"):
            build_schedule(name, {}, lr=LR)


def test_twinkles_names_and_arguments() -> None:
    arguments = {"num_warmup_steps": 2, "num_training_steps": 10}
    for name in ("CosineWarmupScheduler", "LinearWarmupScheduler", "ConstantWarmupScheduler"):
        assert ours(name, arguments, 11) == [LR * lr_factor(name, step, 10, 2) for step in range(11)]
    waves = ours("CosineWarmupScheduler", {**arguments, "num_cycles": 1.0}, 10)
    assert waves == pytest.approx([LR * factor for factor in (0.5, 1, *[0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(8)])])


class Halving(torch.optim.lr_scheduler.LRScheduler):
    """A user's own, written as torch asks."""

    def get_lr(self) -> list[float]:
        return [group["lr"] * (0.5 if self.last_epoch % 3 == 2 else 1.0) for group in self.optimizer.param_groups]


def test_users_classes_and_functions() -> None:
    assert ours(Halving, {}, 10) == pytest.approx(rates(Halving, 10))
    assert ours(Halving, {}, 7) == pytest.approx([LR * 0.5 ** ((step + 1) // 3) for step in range(7)])
    assert ours(lambda step: 1 / (1 + step), {}, 3) == pytest.approx([LR, LR / 2, LR / 3])


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "greedy"])
def test_a_schedule_that_follows_a_metric_goes_on_from_its_state(name: str) -> None:
    arguments = {"patience": 1, "factor": 0.5}
    metrics = [3.0, 2.0, 2.5, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5]
    whole = build_schedule(name, arguments, lr=LR)
    assert isinstance(whole, MetricSchedule)
    assert whole.needs_metric
    expected, states = [], []
    for metric in metrics:
        states.append(json.dumps(whole.state(), allow_nan=False))
        whole.observe(metric)
        expected.append(whole.factor(0))
    assert len(set(expected)) > 1
    for start, state in enumerate(states):
        resumed = build_schedule(name, arguments, lr=LR)
        assert isinstance(resumed, MetricSchedule)
        resumed.load_state(json.loads(state))
        found = []
        for metric in metrics[start:]:
            resumed.observe(metric)
            found.append(resumed.factor(0))
        assert found == expected[start:]
    with pytest.raises(RuntimeError, match="metric nan"):
        whole.observe(math.nan)


def test_plateau_by_hand() -> None:
    schedule = build_schedule("reduce_lr_on_plateau", {"patience": 1, "factor": 0.5}, lr=LR)
    assert isinstance(schedule, MetricSchedule)
    factors = []
    for metric in (2.0, 2.0, 2.0, 2.0, 2.0):  # the third, fifth: two in a row that are no better
        schedule.observe(metric)
        factors.append(schedule.factor(0))
    assert factors == [1, 1, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("cosin", {}, "scheduler is 'cosin'; known: CosineWarmupScheduler, "),
        ("StepLR", {"stepsize": 3}, "StepLR takes no 'stepsize'; known: step_size, gamma"),
        ("StepLR", {}, "StepLR needs step_size"),
        ("StepLR", {"step_size": 0}, "step_size is 0"),
        ("linear", {"num_warmup_steps": 3}, "linear needs num_training_steps"),
        ("cosine_with_min_lr", {"num_warmup_steps": 1, "num_training_steps": 9}, "give one of them"),
        ("warmup_stable_decay", {"num_warmup_steps": 1, "num_decay_steps": 2}, "needs num_stable_steps or num_training_steps"),
        ("polynomial", {"num_warmup_steps": 1, "num_training_steps": 9, "lr_end": 1.0}, "lr_end is 1.0"),
        ("CosineWarmupScheduler", {"num_warmup_steps": 5, "num_training_steps": 4}, "5 warm-up steps of 4"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9}, "pass cycle_momentum=False"),
        ("CyclicLR", {"max_lr": 0.1}, "base_lr"),
        (3, {}, "scheduler is 3"),
    ],
)
def test_what_does_not_fit_is_refused(name: Any, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build_schedule(name, arguments, lr=LR)


def test_a_step_past_the_end_of_one_cycle_is_an_error() -> None:
    schedule = build_schedule("OneCycleLR", {"max_lr": 0.1, "total_steps": 4, "cycle_momentum": False}, lr=LR)
    with pytest.raises(RuntimeError, match="no rate for optimizer step"):
        schedule.factor(9)
