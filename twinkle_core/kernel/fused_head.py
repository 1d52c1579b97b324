"""The loss of a model's supervised positions without its logits. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.kernel.linear_cross_entropy import linear_cross_entropy

TRANSFORMED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")
"""Settings with which a model changes its logits after the head, or its hidden states before it."""


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the logits are the decoder's last hidden states times the head's weight, and nothing else happens to them.

    Not with an adapter on the head, a bias, hooks, a forward pass or weight put in its place, or one of the `TRANSFORMED` settings:
    take the logits there.
    """
    head = model.get_output_embeddings()
    changed = changed_by(model)
    hooks = getattr(head, "_forward_hooks", None) or getattr(head, "_forward_pre_hooks", None)
    return type(head) is torch.nn.Linear and head.bias is None and not changed and not hooks and "forward" not in vars(head)


def changed_by(model: PreTrainedModel) -> list[str]:
    """The `TRANSFORMED` settings that the model has."""
    settings = model.config.get_text_config()
    return [name for name in TRANSFORMED if getattr(settings, name, None) not in (None, 1.0)]


def supervised_loss(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    positions: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of the token losses in nats, a float32 scalar with a gradient.

    `inputs` are the keywords of the model's forward call on one row of T tokens (batch size 1), positions [S] int64
    those of its supervised tokens, each once; labels [S] and loss_weights [S] belong to them. All on the model's device.
    It is the model's whole forward pass, with the loss where the head is: whatever gathers its parameters there (FSDP) takes part.
    """
    head = model.get_output_embeddings()
    if not has_plain_head(model) or not isinstance(head, torch.nn.Linear):
        raise ConfigError(_not_plain(model))
    made: list[torch.Tensor] = []

    def loss_for_logits(hidden: torch.Tensor) -> torch.Tensor:
        loss, _ = linear_cross_entropy(take_rows(hidden[0], positions), head.weight, labels, loss_weights)
        made.append(loss.view(1, 1, 1))
        return made[-1]

    head.forward = loss_for_logits  # type: ignore[method-assign]
    try:
        output: Any = model(**inputs, logits_to_keep=0, use_cache=False)
    finally:
        del head.forward  # the class's own again
    if len(made) != 1 or output.logits.data_ptr() != made[0].data_ptr():
        raise ConfigError(_not_plain(model))
    loss: torch.Tensor = output.logits.view(())
    return loss


def _not_plain(model: PreTrainedModel) -> str:
    return f"model type '{model.config.model_type}' changes its logits after the head: take its logits and their cross-entropy"


def take_rows(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows [S, H] of states [T, H] at positions [S] int64, each at most once: so the gradient is a copy, and deterministic."""
    rows: torch.Tensor = _TakeRows.apply(states, positions)  # type: ignore[no-untyped-call]
    return rows


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(positions)
        ctx.length = len(states)
        return states.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (positions,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.length, grads[0].shape[1]).index_copy_(0, positions, grads[0]), None
