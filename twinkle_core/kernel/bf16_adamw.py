"""AdamW for parameters kept in bf16, without losing an update. Imports torch.

A bf16 parameter of 1.0 does not change when 0.001 is added. Here each parameter has a float32 value, of which the model
sees the bf16 rounding; the 16 bits that the rounding took are kept beside it. So the float32 value costs two bytes more,
not four more, and the parameter cannot drift from it. All of a parameter's update, the gradient's clipping included, is
one kernel on a GPU. On a CPU the value is put together for torch's own fused AdamW, so that it moves as a float32 parameter
does, to the bit; on a GPU the two may differ in the last digits (relative 1e-6 after 20 steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.adamw import adamw

from twinkle_core.errors import ConfigError

MOMENTS = {"float32": torch.float32, "bf16": torch.bfloat16}


class Bf16AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101, decoupled decay) over named bf16 parameters; its state exists from the start.

    `low_bits` are those of the float32 values that the parameters are the rounding of (see `split_bits`); without them they are zeros.
    Bytes a parameter besides parameter and gradient: 2 for the low bits, and 4 or 2 for each moment. A second moment in bf16 stands
    still for beta2 above about 0.99 (its change rounds away), so that is refused.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        moments: str = "float32",
        low_bits: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        wrong = [f"{name} {parameter.dtype}" for name, parameter in parameters.items() if parameter.dtype != torch.bfloat16]
        if wrong:
            raise ConfigError(f"Bf16AdamW takes bf16 parameters, not {wrong[:3]}; others need torch's AdamW")
        check_moments(moments, betas)
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.num_steps = 0
        self._parameters = dict(parameters)
        kinds = {"exp_avg": MOMENTS[moments], "exp_avg_sq": MOMENTS[moments], "low_bits": torch.int16}
        self._state = {
            name: {key: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for key, dtype in kinds.items()}
            for name, parameter in self._parameters.items()
        }
        for name, bits in (low_bits or {}).items():
            self._state[name]["low_bits"] = bits
        self._moments = MOMENTS[moments]

    @torch.no_grad()
    def step(
        self, lr: float | None = None, grad_factor: torch.Tensor | None = None, gradients: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """One update from the parameters' `.grad`, or from `gradients` by name, bf16 or float32, first multiplied by `grad_factor`
        (float32 scalar on their device, for the mean and for clipping). Parameters without a gradient stay. Does not wait for the GPU.
        """
        self.num_steps += 1
        beta1, beta2 = self.betas
        rate = self.lr if lr is None else lr
        numbers = (rate, self.weight_decay, beta1, beta2, self.eps, 1 - beta1**self.num_steps, 1 - beta2**self.num_steps)
        sent: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            grad = parameter.grad if gradients is None else gradients.get(name)
            if grad is None:
                continue
            device, state = parameter.device, self._state[name]
            if device.type == "cpu" and self._moments == torch.float32:
                self._float32_update(parameter.detach(), grad, grad_factor, rate, state)
                continue
            if device not in sent:  # a Python number would be compiled in
                factor = torch.ones((), device=device) if grad_factor is None else grad_factor.to(device)
                sent[device] = factor, torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)
            update = _compiled() if device.type == "cuda" else adamw_update
            flat = {key: tensor.view(-1) for key, tensor in state.items()}
            update(parameter.detach().view(-1), grad.reshape(-1), *sent[device], **flat)

    def _float32_update(
        self, parameter: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor | None, rate: float, state: dict[str, torch.Tensor]
    ) -> None:
        """torch's own update of the float32 value."""
        value = join_bits(parameter, state["low_bits"])
        gradient = grad.float() if factor is None else grad.float() * factor
        adamw(
            [value], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [torch.tensor(self.num_steps - 1.0)], fused=True,
            amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=rate, weight_decay=self.weight_decay, eps=self.eps, maximize=False,
        )  # fmt: skip
        high, low = split_bits(value)
        parameter.copy_(high)
        state["low_bits"].copy_(low)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state: `<parameter>.exp_avg`, `<parameter>.exp_avg_sq` and `<parameter>.low_bits` (int16)."""
        return {f"{name}.{key}": tensor for name, state in self._state.items() for key, tensor in state.items()}

    def float32_value(self, name: str) -> torch.Tensor:
        """The value of parameter `name`, of which the parameter is the rounding."""
        return join_bits(self._parameters[name].detach(), self._state[name]["low_bits"])

    @torch.no_grad()
    def assign(self, name: str, value: torch.Tensor) -> None:
        """Makes the float32 `value` that of parameter `name`."""
        high, low = split_bits(value.to(self._parameters[name].device, torch.float32))
        self._parameters[name].copy_(high)
        self._state[name]["low_bits"].copy_(low)


def check_moments(moments: str, betas: tuple[float, float]) -> None:
    """Raises `ConfigError` for moments of a type that is unknown, or that does not hold them."""
    if moments not in MOMENTS:
        raise ConfigError(f"moments are {moments!r}; known: {', '.join(MOMENTS)}")
    if moments == "bf16" and betas[1] > 0.99:
        raise ConfigError(f"a second moment in bf16 does not move with beta2={betas[1]}; use 0.99 or less, or moments='float32'")


def join_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """float32 from its rounding to bf16 and the signed difference of the bit patterns."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def split_bits(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 nearest to `value` (ties away from zero) and the int16 that `join_bits` makes `value` of again."""
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def adamw_update(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    grad_factor: torch.Tensor,
    numbers: torch.Tensor,
    *,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    low_bits: torch.Tensor,
) -> None:
    """One AdamW update in place, over flat tensors of one parameter; `numbers` float32 [7] as `Bf16AdamW.step` lists them."""
    lr, decay, beta1, beta2, eps, correction1, correction2 = numbers.unbind()
    gradient = grad.float() * grad_factor
    first = beta1 * exp_avg.float() + (1.0 - beta1) * gradient
    second = beta2 * exp_avg_sq.float() + (1.0 - beta2) * gradient * gradient
    value = join_bits(parameter, low_bits) * (1.0 - lr * decay)
    value = value - lr * (first / correction1) / ((second / correction2).sqrt() + eps)
    high, low = split_bits(value)
    parameter.copy_(high)
    low_bits.copy_(low)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)


@cache
def _compiled() -> Any:
    return torch.compile(adamw_update, dynamic=True, fullgraph=True)
