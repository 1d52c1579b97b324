"""How a model's layers run on this worker: compiled or not, what is computed twice, with which kernels. Imports torch."""

from __future__ import annotations

import logging
from typing import cast

import torch
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.infra.environment import fix_cublas_workspace
from twinkle_core.kernel import flash4
from twinkle_core.kernel.layers import Checkpointing, prepare_layers, why_not_compiled
from twinkle_core.kernel.varlen_attention import Kernel
from twinkle_core.model.placement import Placement, Replicated
from twinkle_core.model.spec import ModelSpec

LOG = logging.getLogger(__name__)


def set_up_layers(model: PreTrainedModel, placement: Placement, spec: ModelSpec, precision: str) -> None:
    """Once, when the model has its adapters and lies where it will. Says in the log why a GPU's layers run uncompiled."""
    compiled = spec.compile_layers is not False and model.device.type == "cuda"
    why = _why_not(model, placement, spec, precision) if compiled or spec.compile_layers else None
    if why is not None and spec.compile_layers:
        raise ConfigError(f"compile_layers is True, but {why}: leave it None")
    if why is not None and compiled:
        LOG.warning("the layers of %s run uncompiled: %s", type(model).__name__, why)
    compiled = compiled and why is None
    if compiled or spec.activation_checkpointing != "none":
        prepare_layers(model, compiled=compiled, checkpointing=cast("Checkpointing", spec.activation_checkpointing))


def _why_not(model: PreTrainedModel, placement: Placement, spec: ModelSpec, precision: str) -> str | None:
    if model.device.type != "cuda":
        return f"layers are compiled on a GPU, not on {model.device.type}"
    if precision not in ("bf16", "fp16"):
        return f"mixed_precision is {precision!r}, for which attention is computed by document"
    if not isinstance(placement, Replicated):
        return "the mesh spreads the model over ranks"
    if spec.activation_checkpointing == "selective":
        return "activation_checkpointing is 'selective'"
    return why_not_compiled(model)


def attention_kernel(spec: ModelSpec) -> Kernel:
    """Raises `ConfigError` for one that is not there."""
    if spec.attention_kernel == "flash4" and not flash4.is_installed():
        raise ConfigError("attention_kernel is 'flash4': it needs the package flash-attn-4 and a Hopper or Blackwell GPU; use 'flash2'")
    return cast("Kernel", spec.attention_kernel)


def make_deterministic(spec: ModelSpec, device: torch.device) -> None:
    """On a GPU: operations of this process give the same bits for the same input from here on, or raise an error that names them.

    https://docs.pytorch.org/docs/stable/notes/randomness.html. On a CPU they do so anyway, and nothing changes.
    """
    if device.type != "cuda" or not spec.deterministic:
        return
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that costs time
