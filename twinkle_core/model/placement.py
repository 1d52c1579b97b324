"""How a model's parameters lie on the workers of a group, and what follows from it. Imports torch.

A worker computes on its share of the data and knows nothing of where parameters lie. All that depends on it stands behind
`Placement`: placing the model, the gradients of what is trained, whole tensors for checkpoints, and which part of a batch
and of the sums over it belongs to this rank. `Replicated` is the plain form: every worker holds the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.model.gradients import GradientBucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from twinkle_core.model.spec import ModelSpec


class Gradients(Protocol):
    """The gradients of one set of trained parameters. They are sums of token losses until `normalise_and_clip` divides, once.

    From the start they count as zeros: a worker that had no micro-batch contributes those.
    """

    loss_weight: float
    """Weight of the supervised tokens that this rank counts (see `Placement.leads`) since `zero`."""

    def reduce(self) -> float:
        """Collective. Sums over the ranks that hold the same parameters. Gives the loss weight of the global batch."""
        ...

    def normalise_and_clip(self, loss_weight: float, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Collective. Divides by `loss_weight` and scales down to `max_norm`. Gives the global norm in between, a float64 scalar.

        Does not wait for the device. Where the norm is not finite the gradients are of no use.
        """
        ...

    def zero(self) -> None: ...


class Placement(Protocol):
    """One rank's view of how the model lies on the group."""

    data_rank: int
    """Which share of the data this rank computes, of `data_world_size`. Several ranks may have the same share."""
    data_world_size: int
    leads: bool
    """True on exactly one of the ranks that have the same share of the data: it alone counts rows and tokens."""
    joins_all: bool
    """Every rank must run the same number of forward passes; a rank without rows runs one without a loss."""
    needs_meta: bool
    """The model is built without memory, and `place` fills it from its files."""
    takes_adapters_late: bool
    """Adapters may still be added once the model is placed."""

    cuts_rows: bool
    """A rank computes some positions of each row alone, so that nothing a row is asked for as a whole is known to it."""

    def check(self, model: PreTrainedModel) -> None:
        """Raises `ConfigError` for a model, adapters included, that cannot lie so. Its parameters need no memory; nothing is changed."""
        ...

    def place(self, model: PreTrainedModel, folder: Path | None) -> None:
        """Collective. Changes `model`, adapters included, in place, before its first use. `folder` holds its weights, if any does.

        Parameters may be other objects afterwards, under the same names.
        """
        ...

    def gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> Gradients:
        """The gradients of `parameters`, made once before the first backward pass."""
        ...

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Collective. Whole, contiguous CPU copies, on rank 0; the other ranks get {}. Takes plain tensors too (step counts)."""
        ...

    def scatter(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        """Copies each whole CPU tensor of `source` (read by every rank) into this rank's part of the tensor of that name."""
        ...

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a collated batch (`InputProcessor.collate`), where the sequence is shared among ranks."""
        ...

    def own_part(self, loss_sum: float) -> float:
        """This rank's part of a loss sum that is then added up over all ranks, whatever they share."""
        ...


class Replicated:
    """Every worker holds all parameters and computes its own share of the data."""

    leads = True
    joins_all = False
    needs_meta = False
    takes_adapters_late = True
    cuts_rows = False

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self.data_rank = rank
        self.data_world_size = world_size

    def check(self, model: PreTrainedModel) -> None:
        pass

    def place(self, model: PreTrainedModel, folder: Path | None) -> None:
        pass

    def gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> GradientBucket:
        return GradientBucket(parameters.values(), self.data_world_size)

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._rank != 0:
            return {}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def scatter(self, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in target.items():
                tensor.copy_(source[name])

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def own_part(self, loss_sum: float) -> float:
        return loss_sum


def open_placement(rank: int, world_size: int, device: torch.device, spec: ModelSpec, mixed_precision: str) -> Placement:
    """What the mesh asks for. Collective. Raises `ConfigError` for a mesh that does not fit the group, and for a form that is not there."""
    if spec.device_mesh is None:
        if spec.fsdp_config or spec.memory_efficient_init:
            raise ConfigError("fsdp_config and memory_efficient_init are for a device_mesh with fsdp_size above 1")
        return Replicated(rank, world_size)
    from twinkle_core.model.parallel.spread import placement_for

    return placement_for(
        rank,
        world_size,
        device,
        device_mesh=spec.device_mesh,
        fsdp_config=spec.fsdp_config,
        mixed_precision=mixed_precision,
        memory_efficient_init=spec.memory_efficient_init,
    )
