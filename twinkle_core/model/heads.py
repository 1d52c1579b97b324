"""What a model gives besides logits: its last hidden states, and the scores of a head for sequences. Imports torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.model.placement import Placement

SCORE_HEADS = ("score", "classifier")
"""Where transformers' models for sequences have their head."""
OF_WHOLE_ROWS = ("hidden", "embeddings", "scores")


def score_head(model: Any) -> torch.nn.Module | None:
    """The head of a model for sequences (AutoModelForSequenceClassification); None for a language model."""
    if model.get_output_embeddings() is not None:
        return None
    found = (getattr(model, name, None) for name in SCORE_HEADS)
    return next((head for head in found if isinstance(head, torch.nn.Module)), None)


def of_score_head(names: Iterable[str]) -> list[str]:
    """Those names of parameters that belong to such a head."""
    return [name for name in names if any(part in SCORE_HEADS for part in name.split("."))]


def check_needs(model: PreTrainedModel, needs: Collection[str]) -> None:
    """Raises `ConfigError` where the model has no head for what is asked of it."""
    if score_head(model) is None:
        if "scores" in needs:
            hint = "build it with model_cls='AutoModelForSequenceClassification' (num_labels=1 for one score)"
            raise ConfigError(f"scores are asked of {type(model).__name__}, which has no head for them: {hint}")
    elif missing := sorted(set(needs) - {"scores", "embeddings"}):
        hint = "set_loss('RewardModelLoss') or ('MSELoss'), or a loss of your own that needs scores; forward_only takes task='scores'"
        raise ConfigError(f"{', '.join(missing)} are asked of {type(model).__name__}, which gives scores alone: {hint}")


def check_whole_rows(model: PreTrainedModel, placement: Placement, needs: Collection[str]) -> None:
    """Raises `ConfigError` where the mesh leaves no rank with what is asked for. On every rank alike, before any waits for another."""
    asked = sorted(set(needs) & set(OF_WHOLE_ROWS))
    if not asked:
        return
    if placement.cuts_rows:
        raise ConfigError(f"{', '.join(asked)} are asked for, and the mesh cuts rows over ranks (ulysses_size, cp_size): use fsdp_size")
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if "hidden" in needs and isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()):
        raise ConfigError("a loss over hidden states needs the whole head, which tp_size splits: use CrossEntropyLoss, or fsdp_size")


def last_hidden_states(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """[T, H] what goes into the head, of one packed row.

    A sharded model gathers the parameters outside its layers where it is called as a whole, so that is done there, with the head at one
    position; they stay gathered until the backward pass, the head's among them.
    """
    decoder: Any = model.get_decoder()
    if not isinstance(model, FSDPModule):
        plain: torch.Tensor = decoder(**inputs, use_cache=False).last_hidden_state[0]
        return plain
    kept: list[torch.Tensor] = []
    hook = decoder.register_forward_hook(lambda module, arguments, output: kept.append(output.last_hidden_state[0]))
    one = {} if score_head(model) is not None else {"logits_to_keep": torch.zeros(1, dtype=torch.int64)}
    try:
        model(**inputs, **one, use_cache=False)
    finally:
        hook.remove()
    return kept[0]


def sequence_scores(model: PreTrainedModel, inputs: dict[str, Any], last: torch.Tensor) -> torch.Tensor:
    """float32 [D], or [D, C] of a head with C > 1 outputs: the head at positions `last` [D], the last token of each document."""
    head = score_head(model)
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no head that scores sequences")
    kept: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, arguments, output: kept.append(output[0]))
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    scores = kept[0][last].float()
    return scores[:, 0] if scores.shape[1] == 1 else scores
