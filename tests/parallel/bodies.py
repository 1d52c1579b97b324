"""What each rank of a parallel test does, through the model that a user has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.parallel.oracle import BATCHES
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel


def open_model(rank: int, folder: Path, sizes: Mapping[str, int] | None, **settings: Any) -> tuple[TransformersModel, Any]:
    """The model on all ranks of the process group, and this rank's worker. `sizes` None: without a mesh."""
    world_size = dist.get_world_size()
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=world_size, init_method="unused: the group is joined")
    mesh = None if sizes is None else DeviceMesh.from_sizes(**sizes)
    return TransformersModel(folder, group=group, device_mesh=mesh, **{"mixed_precision": "no", **settings}), group._worker


def gradients_of(
    rank: int, folder: Path, adapter: Path | None, sizes: Mapping[str, int] | None, settings: Mapping[str, Any], max_norm: float
) -> dict[str, dict[str, Any]]:
    """Of each of `BATCHES`: loss sum, tokens, weight, norm, and (rank 0) whole gradients, clipped."""
    model, worker = open_model(rank, folder, sizes, **settings)
    if adapter is not None:
        model.add_adapter_to_model("default", adapter)
    model.set_optimizer("AdamW", lr=1e-3)
    return {name: gradients_of_batch(model, worker, name, max_norm) for name in BATCHES}


def gradients_of_batch(model: TransformersModel, worker: Any, name: str, max_norm: float) -> dict[str, Any]:
    outputs = [model.forward_backward(rows, micro_batch_size=size) for rows, size in BATCHES[name]]
    norm = model.clip_grad_norm(max_norm)
    parameters = worker.state().parameters
    whole = worker.placement.gather({name: parameter.grad for name, parameter in parameters.items()})
    model.zero_grad()
    return {
        "loss": sum(float(output.loss_sum) for output in outputs),
        "num_loss_tokens": sum(output.num_loss_tokens for output in outputs),
        "weight": sum(output.loss_weight for output in outputs),
        "norm": float(norm or 0.0),
        "gradients": {name: value.numpy() for name, value in whole.items()},
    }
