"""Gradients of bf16 parameters, added up in float32. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from twinkle_core.model.gradients import clip_factor, sum_over_ranks


class HalfGradients:
    """What a worker does with the gradients of bf16 parameters between backward passes and the optimizer's step.

    Each backward pass leaves bf16 gradients. Those of a window's first are kept as they are; with the second they become float32
    sums, and later ones are added to those, so that no micro-batch is lost to rounding. They are taken from `.grad` as soon as they
    are there: a compiled layer refuses a parameter whose `.grad` is of another type. The division and the clipping are not written
    into them but left in `factor`, for the optimizer to multiply by in its own pass.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> None:
        self._parameters = dict(parameters)
        self._world_size = world_size
        self.sums: dict[str, torch.Tensor] = {}
        """By name, those that are not zero: bf16 or float32, of the parameter's shape. `factor` times these is the gradient."""
        self.factor: torch.Tensor | None = None
        """float32 scalar on the parameters' device; None until `normalise_and_clip`."""
        self.loss_weight = 0.0
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._taking(name)) for name, parameter in self._parameters.items()]

    def close(self) -> None:
        """Leaves the parameters to themselves."""
        for hook in self._hooks:
            hook.remove()
        self.zero()

    def reduce(self) -> float:
        """Sums gradients over workers, in float32. Gives the loss weight of the global batch."""
        if self._world_size == 1:
            return self.loss_weight
        device = next(iter(self._parameters.values())).device
        flat = torch.zeros(sum(parameter.numel() for parameter in self._parameters.values()), device=device)
        parts = {
            name: part.view(parameter.shape)
            for (name, parameter), part in zip(
                self._parameters.items(), flat.split([parameter.numel() for parameter in self._parameters.values()]), strict=True
            )
        }
        for name in list(self.sums):
            parts[name].copy_(self.sums.pop(name))
        weight = sum_over_ranks(self.loss_weight, device)
        dist.all_reduce(flat)
        self.sums = parts
        return weight

    def normalise_and_clip(self, loss_weight: float, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Leaves in `factor` what divides by the weight of the batch and scales down to `max_norm`. Gives the norm in between, a float64
        scalar on the device, and does not wait for it.
        """
        norm = self._norm(norm_type).double() / loss_weight
        self.factor = (clip_factor(norm, max_norm) / loss_weight).float()
        return norm

    def gradient(self, name: str) -> torch.Tensor:
        """The sum of one parameter, bf16 or float32, zeros included."""
        parameter = self._parameters[name]
        return self.sums[name] if name in self.sums else torch.zeros_like(parameter, requires_grad=False)

    def zero(self) -> None:
        self.sums.clear()
        self.factor = None
        self.loss_weight = 0.0
        for parameter in self._parameters.values():
            parameter.grad = None

    def _norm(self, norm_type: float) -> torch.Tensor:
        """float32 scalar, of all gradients as one vector."""
        device = next(iter(self._parameters.values())).device
        if not self.sums:
            return torch.zeros((), device=device)
        norms = torch._foreach_norm([self.sums[name] for name in self._parameters if name in self.sums], norm_type, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms), norm_type)

    def _taking(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            """After a backward pass has come to the parameter."""
            found, parameter.grad = parameter.grad, None
            if found is None:
                return
            before = self.sums.get(name)
            if before is None:
                self.sums[name] = found
            elif before.dtype == torch.float32:
                before.add_(found)
            else:
                self.sums[name] = before.float().add_(found)

        return take
