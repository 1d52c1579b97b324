"""Tiny models on disk for parallel tests, and the single-process result that every parallel form must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from twinkle_core.loss.cross_entropy import token_losses
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import IGNORE, PackedRow

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False},
    ),
}


def save_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """A model with clearly non-uniform outputs, always the same."""
    config_class, settings = CONFIGS[architecture]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **settings, **changes}))
    model.save_pretrained(folder)
    return folder


def row(*lengths: int, seed: int = 0, weighted: bool = False) -> PackedRow:
    """Random documents; the first token of each is a prompt and the last predicts nothing."""
    generator = np.random.default_rng([seed, *lengths])
    input_ids = generator.integers(3, VOCABULARY, sum(lengths)).astype(np.int32)
    labels = np.roll(input_ids, -1)
    ends = np.cumsum(lengths)
    labels[ends - 1] = IGNORE
    labels[ends - np.array(lengths)] = IGNORE
    weights = generator.uniform(0.5, 2.0, sum(lengths)).astype(np.float32) if weighted else None
    return PackedRow(
        input_ids=input_ids,
        labels=labels,
        seq_lens=np.array(lengths, dtype=np.int32),
        sample_ids=np.arange(len(lengths), dtype=np.int64),
        loss_weights=weights,
    )


def packed_micro_batches(num: int) -> list[list[PackedRow]]:
    """One row of one to three documents a micro-batch, of unequal lengths; the first row has loss weights."""
    lengths = [[4 + (3 * index + 5 * part) % 9 for part in range(1 + index % 3)] for index in range(num)]
    return [[row(*documents, seed=index, weighted=index == 0)] for index, documents in enumerate(lengths)]


def several_row_micro_batches(num: int) -> list[list[PackedRow]]:
    """Two rows of one document each a micro-batch: what others pad."""
    return [[row(5 + index % 4, seed=2 * index), row(9 - index % 3, seed=2 * index + 1)] for index in range(num)]


def loss_of(model: torch.nn.Module, rows: Sequence[PackedRow]) -> torch.Tensor:
    batch = InputProcessor().collate(rows)
    labels = batch["labels"][0]
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], seq_lens=batch["seq_lens"], use_cache=False).logits[0]
    return token_losses(logits, labels).sum()


def oracle(folder: Path, micro_batches: Sequence[Sequence[PackedRow]], max_norm: float = 1e9) -> dict[str, Any]:
    """The same on one process with none of our code: transformers' own attention, a document at a time, torch's own cross-entropy."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    weight = sum(one.loss_weight for rows in micro_batches for one in rows)
    total = 0.0
    for one in (one for rows in micro_batches for one in rows):
        start = 0
        for length in one.seq_lens.tolist():
            part = slice(start, start + length)
            ids, labels = (torch.from_numpy(values[part].astype(np.int64)) for values in (one.input_ids, one.labels))
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
            if one.loss_weights is not None:
                losses = losses * torch.from_numpy(one.loss_weights[part])
            (losses.sum() / weight).backward()
            total += float(losses.detach().sum())
            start += length
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return {"loss": total, "weight": weight, "norm": norm, "gradients": gradients}


def assert_same(got: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    """Losses, weights, norms, and each gradient within `rtol` of its largest value."""
    assert got["loss"] == pytest_approx(expected["loss"], rtol)
    assert got["weight"] == pytest_approx(expected["weight"], 1e-6)
    assert got["norm"] == pytest_approx(expected["norm"], rtol)
    if got["gradients"]:
        assert got["gradients"].keys() == expected["gradients"].keys()
        for name, value in expected["gradients"].items():
            np.testing.assert_allclose(got["gradients"][name], value, rtol=rtol, atol=rtol * np.abs(value).max(), err_msg=name)


def pytest_approx(value: float, rtol: float) -> Any:
    import pytest

    return pytest.approx(value, rel=rtol)
