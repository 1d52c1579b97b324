"""The preset AdamW over parameters that the model holds in bf16, behind the methods of `Optimizer`. Imports torch.

A parameter has a float32 value, of which the model computes with the bf16 rounding (`kernel/bf16_adamw.py`). To the outside
there is the float32 value alone: a checkpoint has the tensors that it has where the model is float32, and passes to and fro.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.kernel.bf16_adamw import Bf16AdamW, check_moments, split_bits
from twinkle_core.model.half_gradients import HalfGradients
from twinkle_core.model.optimizer import optimizer_class, preset_arguments, shown_arguments

TAKEN = {"lr", "weight_decay", "betas", "eps", "fused", "amsgrad", "moments"}
"""Arguments with which AdamW is the preset one; with others (foreach, maximize, …) it is torch's, over float32 parameters."""


def is_taken(optimizer_cls: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether these settings are the preset AdamW's."""
    _, name = optimizer_class(optimizer_cls)
    preset = arguments.get("fused", True) is True and not arguments.get("amsgrad", False)
    return name == "AdamW" and arguments.keys() <= TAKEN and preset and not isinstance(arguments.get("lr"), torch.Tensor)


class SplitAdamW:
    """AdamW over `parameters`, float32 until now and bf16 from here on, with the gradients that `gradients` gathers.

    'moments' 'bf16' (beside torch's arguments) halves the moments' memory where beta2 is at most 0.99; checkpoints hold them as float32.
    """

    is_preset = True

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], arguments: Mapping[str, Any]) -> None:
        given = preset_arguments(arguments)
        moments = given.pop("moments", "float32")
        if "lr" not in given:
            raise ConfigError("optimizer AdamW needs lr, the learning rate at its peak")
        try:
            torch.optim.AdamW([torch.zeros(1)], **given)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"optimizer AdamW refuses {given}: {error}") from error
        check_moments(moments, tuple(given["betas"]))  # before the parameters are halved
        self.base_lr = self._lr = float(given["lr"])
        self.settings = {"name": "AdamW", "groups": [shown_arguments(given) | ({"moments": moments} if moments != "float32" else {})]}
        self._parameters = dict(parameters)
        low_bits = {name: _halve(parameter) for name, parameter in self._parameters.items()}
        self._adamw = Bf16AdamW(
            self._parameters,
            lr=self._lr,
            weight_decay=given["weight_decay"],
            betas=tuple(given["betas"]),
            eps=given["eps"],
            moments=moments,
            low_bits=low_bits,
        )
        self.gradients: HalfGradients | None = None
        """Whose sums and factor `step` takes; set once they are there."""

    def step(self) -> None:
        if self.gradients is None:
            raise ConfigError("no gradients are set")
        self._adamw.step(self._lr, self.gradients.factor, _ByName(self._parameters, self.gradients.gradient))

    def set_factor(self, factor: float) -> None:
        self._lr = self.base_lr * factor

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Whole float32 state, under the names that the float32 form has; made when asked for."""
        names = [f"{name}.{key}" for name in self._parameters for key in ("step", "exp_avg", "exp_avg_sq")]
        return _ByName(names, self._state_tensor)

    def _state_tensor(self, full: str) -> torch.Tensor:
        name, _, key = full.rpartition(".")
        if key == "step":
            return torch.tensor(float(self._adamw.num_steps), device=self._parameters[name].device)
        return self._adamw.tensors()[full].float()

    def plain_state(self) -> None:
        return None

    def room(self, plain: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
        """What a saved state looks like, without memory."""
        shapes = {key: parameter.shape for name, parameter in self._parameters.items() for key in (f"{name}.exp_avg", f"{name}.exp_avg_sq")}
        shapes |= {f"{name}.step": torch.Size(()) for name in self._parameters}
        return {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}

    def load(self, room: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], plain: Mapping[str, Any] | None) -> None:
        """Takes over a saved state, all of which is this rank's."""
        steps = {float(local[f"{name}.step"]) for name in self._parameters}
        if len(steps) != 1:
            raise DataError(f"parameters took different numbers of steps ({sorted(steps)}): load the weights alone")
        self._adamw.num_steps = int(steps.pop())
        for name, tensor in self._adamw.tensors().items():
            if not name.endswith(".low_bits"):
                tensor.copy_(local[name])

    def float32_values(self) -> Mapping[str, torch.Tensor]:
        """What the parameters are the rounding of, each made when asked for."""
        return _ByName(self._parameters, self._adamw.float32_value)

    def assign(self, values: Mapping[str, torch.Tensor]) -> None:
        """Makes these the parameters' values."""
        for name in self._parameters:
            self._adamw.assign(name, values[name])

    def give_back(self) -> None:
        """Makes the parameters float32 again, with their whole values."""
        if self.gradients is not None:
            self.gradients.close()
        for name, parameter in self._parameters.items():
            parameter.data = self._adamw.float32_value(name)


class _ByName(Mapping[str, torch.Tensor]):
    """Tensors that are made one at a time, so that a large model's do not all exist at once."""

    def __init__(self, names: Mapping[str, Any] | list[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _halve(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Rounds the parameter in place, and gives what that took from it."""
    parameter.grad = None
    high, low = split_bits(parameter.data.float().contiguous())
    parameter.data = high
    return low
