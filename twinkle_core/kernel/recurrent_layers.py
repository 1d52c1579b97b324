"""Layers that carry a state from token to token (gated delta nets), one document of a packed row after the other. Imports torch.

Their short convolution and their recurrent state would run on from one document into the next. transformers' own code starts anew at
document boundaries only with two optional GPU packages; cut apart, every document starts from nothing whatever computes it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

LAYERS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
}
"""Model type → the class, beside the model's own, of its layers of type linear_attention."""


def split_by_document(model_class: type[PreTrainedModel], model_type: str) -> bool:
    """Whether this model type has recurrent layers that obey `seq_lens`, which they do from here on. Harmless when repeated.

    It is the class that changes, so that copies and sharded forms of a model keep it; without `seq_lens` it computes as before.
    """
    if model_type not in LAYERS:
        return False
    layer = getattr(sys.modules[model_class.__module__], LAYERS[model_type])
    if not getattr(layer, "obeys_seq_lens", False):
        layer.forward, layer.obeys_seq_lens = _by_document(layer.forward), True
    return True


def _by_document(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def by_document(
        self: Any,
        hidden_states: torch.Tensor,
        *args: Any,
        seq_lens: Sequence[int] | None = None,
        cu_seq_lens: torch.Tensor | None = None,
        max_seq_len: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, H]; boundaries as `packed_attention.document_boundaries` gives them; `max_seq_len` is not needed."""
        if seq_lens is None and cu_seq_lens is not None:
            seq_lens = cu_seq_lens.diff().tolist()  # waits for the GPU, in each such layer
        if seq_lens is None:
            return forward(self, hidden_states, *args, **kwargs)
        parts = hidden_states.split(list(seq_lens), dim=1)
        return torch.cat([forward(self, part, *args, **kwargs) for part in parts], dim=1)

    return by_document
