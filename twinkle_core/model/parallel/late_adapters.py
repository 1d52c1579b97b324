"""Adding an adapter to a model whose parameters lie in parts already. Imports torch.

peft takes a layer's sizes from its weight, and would take those of this rank's part. The adapter's own tensors are whole on every
rank; their gradients are added up by `ShardedGradients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from twinkle_core.errors import ConfigError

PLAIN_STARTS = (True, False, "gaussian")


def check_late(settings: Any) -> None:
    """Raises `ConfigError` for peft settings that read or copy the base model's weights, which are not whole anywhere."""
    read = {
        name for name in ("use_dora", "modules_to_save", "target_parameters", "trainable_token_indices") if getattr(settings, name, None)
    }
    if getattr(settings, "init_lora_weights", True) not in PLAIN_STARTS:
        read.add("init_lora_weights")
    if read:
        what = ", ".join(sorted(read))
        raise ConfigError(f"the adapter's {what} read the base model's weights, which are sharded: set memory_efficient_init=False")


@contextmanager
def whole_shapes(model: torch.nn.Module) -> Iterator[None]:
    """Shows whole weights, all zeros and without memory, in the place of parts. What is frozen meanwhile stays frozen."""
    shown: list[tuple[torch.nn.Module, str, Any]] = [
        (module, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for module, key, parameter in shown:
        zeros = torch.zeros((), dtype=parameter.dtype, device=parameter.to_local().device).expand(parameter.shape)
        module._parameters[key] = torch.nn.Parameter(zeros, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, key, parameter in shown:
            stand_in = module._parameters[key]
            parameter.requires_grad_(stand_in is not None and stand_in.requires_grad)
            module._parameters[key] = parameter
