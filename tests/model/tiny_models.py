"""Two-layer random models of real architectures, and rows for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from twinkle_core.types import IGNORE, PackedRow

VOCABULARY = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": (MistralConfig, {"tie_word_embeddings": False, "sliding_window": 5}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"tie_word_embeddings": False, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}


def save_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """A model with clearly non-uniform outputs, always the same."""
    config_class, settings = CONFIGS[architecture]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **settings, "initializer_range": 0.2, **changes}))
    model.save_pretrained(folder)
    return folder


def packed_row(*lengths: int, seed: int = 0, learn_nothing: bool = False, weighted: bool = False) -> PackedRow:
    """Random documents of these lengths; the first token of each is a prompt, the rest is learnt, with `weighted` unequally much."""
    generator = np.random.default_rng([seed, *lengths])
    input_ids = generator.integers(3, VOCABULARY, sum(lengths)).astype(np.int32)
    labels = np.roll(input_ids, -1)
    ends = np.cumsum(lengths)
    labels[ends - 1] = IGNORE
    labels[ends - np.array(lengths)] = IGNORE
    if learn_nothing:
        labels[:] = IGNORE
    weights = generator.uniform(0.5, 2.0, sum(lengths)).astype(np.float32) if weighted else None
    return PackedRow(
        input_ids=input_ids,
        labels=labels,
        seq_lens=np.array(lengths, dtype=np.int32),
        sample_ids=np.arange(len(lengths), dtype=np.int64),
        loss_weights=weights,
    )


def batch(num_rows: int, seed: int = 0) -> Sequence[PackedRow]:
    """Rows of unequal length and number of supervised tokens."""
    return [packed_row(*(3 + (seed + 5 * row + 3 * part) % 11 for part in range(1 + row % 3)), seed=seed + row) for row in range(num_rows)]
