"""The optimizer with its schedule, and their state as named tensors and plain values. Imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.model.parallel.whole_tensors import assign_local
from twinkle_core.scheduler import SCHEDULERS, MetricSchedule, build_schedule

NOT_TAKEN = {"LBFGS": "it needs the loss several times a step", "SparseAdam": "gradients here are dense"}


class Schedule:
    """A schedule of `twinkle_core.scheduler`, with the settings that it was built of, and its end where it has one."""

    def __init__(self, scheduler_cls: Any, arguments: Mapping[str, Any], *, lr: float) -> None:
        is_ours = isinstance(scheduler_cls, str) and scheduler_cls in SCHEDULERS
        given = {**({"num_warmup_steps": 0} if is_ours else {}), **arguments}
        self._schedule = build_schedule(scheduler_cls, given, lr=lr)
        name = scheduler_cls if isinstance(scheduler_cls, str) else getattr(scheduler_cls, "__qualname__", type(scheduler_cls).__name__)
        self.settings: dict[str, Any] = {"name": name, **given}
        self.num_training_steps: int | None = given["num_training_steps"] if is_ours else None

    def factor(self, step: int) -> float:
        return self._schedule.factor(step)

    def observe(self, metric: float | None) -> None:
        """For schedules that follow a metric."""
        if isinstance(self._schedule, MetricSchedule):
            if metric is None:
                raise ConfigError(f"scheduler {self.settings['name']} follows a metric: call lr_step(metric=…) yourself, after step")
            self._schedule.observe(metric)
        elif metric is not None:
            raise ConfigError(f"scheduler {self.settings['name']} follows the steps, not a metric")

    @property
    def state(self) -> dict[str, Any] | None:
        """What the step does not say."""
        return self._schedule.state() if isinstance(self._schedule, MetricSchedule) else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        if isinstance(self._schedule, MetricSchedule) and state is not None:
            self._schedule.load_state(state)


class Optimizer:
    """An optimizer of torch, or a class like those, over named parameters, with a state that is tensors and plain values.

    `AdamW` (https://arxiv.org/abs/1711.05101) is torch's fused one, without weight decay unless it is given; its state
    exists, as zeros, from the start. The state of the others appears with their first step.
    """

    def __init__(self, optimizer_cls: Any, parameters: Mapping[str, torch.nn.Parameter], arguments: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)
        build, name = optimizer_class(optimizer_cls)
        given = dict(arguments)
        if name == "AdamW":
            given = preset_arguments(given)
        _check_arguments(build, name, given)
        try:
            self.torch = build(_groups_of(self._parameters), **given)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"optimizer {name} refuses {given}: {error}") from error
        self._base_lrs = [float(group["lr"]) for group in self.torch.param_groups]
        self.settings = {"name": name, "groups": [shown_arguments(given)]}
        self.is_preset = name == "AdamW" and given["fused"] is True and not given.get("amsgrad")
        if self.is_preset:
            for parameter in self._parameters.values():
                self.torch.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @property
    def base_lr(self) -> float:
        return self._base_lrs[0]

    def set_factor(self, factor: float) -> None:
        """Sets each group's rate to `factor` times the one that it was built with."""
        for group, base in zip(self.torch.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor

    def step(self) -> None:
        self.torch.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state: of AdamW `<parameter>.exp_avg`, `<parameter>.exp_avg_sq`, `<parameter>.step` of each parameter."""
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self.torch.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def plain_state(self) -> dict[str, Any] | None:
        """What is not a tensor, and the tensors' names, types and shapes; None where the names follow from the optimizer."""
        if self.is_preset:
            return None
        values = {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self.torch.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.torch.param_groups]
        shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in self.tensors().items()}
        return {"values": values, "groups": [_plain(group) for group in groups], "tensors": shapes}

    def room(self, plain: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
        """Tensors to fill with a saved state: the live ones, or, where they appear with the first step only, new ones that lie alike."""
        if self.is_preset or plain is None:
            return self.tensors()
        found: dict[str, torch.Tensor] = {}
        for full, like in _described(plain).items():
            name, _, key = full.rpartition(".")
            parameter = self._known(name)
            if like.shape == parameter.shape:
                found[full] = torch.zeros_like(parameter, dtype=like.dtype)
            else:
                on_cpu = key == "step" and not (self.torch.defaults.get("fused") or self.torch.defaults.get("capturable"))
                found[full] = torch.zeros(like.shape, dtype=like.dtype, device="cpu" if on_cpu else parameter.device)
        return found

    def load(self, room: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], plain: Mapping[str, Any] | None) -> None:
        """Takes over a saved state: this rank's parts of the tensors of `room`, and what is not a tensor."""
        assign_local(room, local)
        if self.is_preset or plain is None:
            return
        for name in plain["values"]:
            self._known(name.rpartition(".")[0])
        groups = self.torch.param_groups
        alike = plain["groups"] if len(plain["groups"]) == len(groups) else plain["groups"][:1] * len(groups)
        for group, saved in zip(groups, alike, strict=True):
            group.update({key: type(group[key])(value) if isinstance(group[key], tuple) else value for key, value in saved.items()})
        self.torch.state.clear()
        for full, value in [*room.items(), *plain["values"].items()]:
            name, _, key = full.rpartition(".")
            self.torch.state[self._parameters[name]][key] = value

    def _known(self, name: str) -> torch.nn.Parameter:
        if name not in self._parameters:
            raise DataError(f"the optimizer's saved state is of a parameter {name}, which is not trained here")
        return self._parameters[name]


def _described(plain: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a saved state, without memory."""
    kinds = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    try:
        return {name: torch.empty(shape, dtype=kinds[kind], device="meta") for name, (kind, shape) in plain["tensors"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the optimizer's saved state is not understood ({error})") from error


def _groups_of(parameters: Mapping[str, torch.nn.Parameter]) -> list[Any]:
    """The parameters, or a group for each mesh that they lie on: torch steps tensors of one mesh at a time."""
    by_mesh: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters.values():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    groups = list(by_mesh.values())
    return groups[0] if len(groups) == 1 else [{"params": group} for group in groups]


def preset_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of AdamW."""
    return {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True} | dict(arguments)


def shown_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """As a checkpoint holds them: how the update is computed is left out."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items() if key != "fused"}


def optimizer_class(optimizer_cls: Any) -> tuple[Callable[..., torch.optim.Optimizer], str]:
    """The class and its name: one of torch.optim by name, or the user's own class or function of parameters."""
    known = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    known = {name: kind for name, kind in known.items() if kind is not torch.optim.Optimizer and name not in NOT_TAKEN}
    if isinstance(optimizer_cls, str):
        if optimizer_cls not in known:
            reason = f" ({NOT_TAKEN[optimizer_cls]})" if optimizer_cls in NOT_TAKEN else ""
            raise ConfigError(f"optimizer is {optimizer_cls!r}{reason}; known: {', '.join(sorted(known))}")
        return known[optimizer_cls], optimizer_cls
    if isinstance(optimizer_cls, torch.optim.Optimizer) or not callable(optimizer_cls):
        raise ConfigError(
            f"optimizer is {optimizer_cls!r}: give a name, or a class and its arguments; it is built over the trained parameters"
        )
    return optimizer_cls, "AdamW" if optimizer_cls is torch.optim.AdamW else getattr(
        optimizer_cls, "__qualname__", type(optimizer_cls).__name__
    )


def _check_arguments(build: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(build).parameters
    names = [key for key, parameter in parameters.items() if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)][
        1:
    ]
    unknown = sorted(given.keys() - set(names))
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ConfigError(f"optimizer {name} has no argument {', '.join(unknown)}; known: {', '.join(names)}")
    if "lr" not in given:
        raise ConfigError(f"optimizer {name} needs lr, the learning rate at its peak")


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: list(value) if isinstance(value, tuple) else float(value) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
    }
