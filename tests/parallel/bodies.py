"""What each rank of a parallel test does: the worker's loop over the placement protocol, and what it found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.models import row
from twinkle_core.loss.cross_entropy import token_losses
from twinkle_core.model.loading import load_model
from twinkle_core.model.parallel.fully_sharded import ShardingSettings
from twinkle_core.model.parallel.layout import Layout
from twinkle_core.model.parallel.spread import Spread
from twinkle_core.model.spec import ModelSpec
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import IGNORE, PackedRow

CPU = torch.device("cpu")


def loss_of_part(model: torch.nn.Module, placement: Spread, rows: Sequence[PackedRow]) -> torch.Tensor:
    """Summed token losses of this rank's part of the rows, as the worker computes them."""
    batch = placement.cut(InputProcessor().collate(rows))
    labels = batch["labels"][0]
    kept = (labels != IGNORE).nonzero()[:, 0]
    output = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        seq_lens=batch["seq_lens"],
        logits_to_keep=kept,
        use_cache=False,
    )
    losses = token_losses(output.logits[0], labels[kept])
    return (losses * batch["loss_weights"][0][kept] if "loss_weights" in batch else losses).sum()


def accumulate(model: torch.nn.Module, placement: Spread, gradients: Any, micro_batches: Sequence[Sequence[PackedRow]]) -> float:
    """Gradients of all micro-batches; rank r of the data computes r, r + n, …. A rank without one joins with a row that has no loss."""
    total = 0.0
    for first in range(0, len(micro_batches), placement.data_world_size):
        index = first + placement.data_rank
        idle = index >= len(micro_batches)
        rows = [row(4)] if idle else micro_batches[index]
        loss = loss_of_part(model, placement, rows) * (0.0 if idle else 1.0)
        loss.backward()
        if not idle:
            total += placement.own_part(float(loss.detach()))
            if placement.leads:
                gradients.loss_weight += math.fsum(row.loss_weight for row in rows)
    return total


def built(rank: int, folder: Path, layout: Layout, settings: ShardingSettings) -> tuple[Any, Spread]:
    placement = Spread(rank, layout, settings, CPU)
    model, _ = load_model(ModelSpec(model_id=str(folder)), CPU, on_meta=placement.needs_meta)
    placement.place(model, folder)
    return model, placement


def gradients_of(
    rank: int, folder: Path, layout: Layout, settings: ShardingSettings, calls: Sequence[Sequence[Sequence[PackedRow]]], max_norm: float
) -> dict[str, Any]:
    """Loss sum, weight, norm and whole gradients (rank 0) after the calls, each a list of micro-batches."""
    model, placement = built(rank, folder, layout, settings)
    parameters = dict(model.named_parameters())
    gradients = placement.gradients(parameters)
    loss = torch.tensor(sum(accumulate(model, placement, gradients, micro_batches) for micro_batches in calls), dtype=torch.float64)
    dist.all_reduce(loss)
    weight = gradients.reduce()
    norm = float(gradients.normalise_and_clip(weight, max_norm))
    whole = placement.gather({name: parameter.grad for name, parameter in parameters.items()})
    return {"loss": float(loss), "weight": weight, "norm": norm, "gradients": {name: value.numpy() for name, value in whole.items()}}
