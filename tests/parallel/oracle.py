"""Batches for parallel tests, and what one process makes of them with none of our code: every parallel form must equal it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.tiny_models import packed_row
from twinkle_core.types import IGNORE, PackedRow

Call = tuple[Sequence[PackedRow], int]
"""Rows of a call of `forward_backward`, and its micro_batch_size."""


def packed_rows(num: int) -> list[PackedRow]:
    """Rows of one to three documents of unequal lengths; the first row has loss weights."""
    lengths = [[4 + (3 * index + 5 * part) % 9 for part in range(1 + index % 3)] for index in range(num)]
    return [packed_row(*documents, seed=index, weighted=index == 0) for index, documents in enumerate(lengths)]


def padded_rows(num: int) -> list[PackedRow]:
    """Rows of one document, of unequal lengths: what others pad."""
    return [packed_row(5 + (4 * index) % 7, seed=40 + index) for index in range(num)]


BATCHES: dict[str, list[Call]] = {
    "padded": [(padded_rows(9), 2)],
    "padded, three calls": [(padded_rows(5), 2), (padded_rows(3), 3), (padded_rows(1), 2)],
    "packed": [(packed_rows(5), 1)],
    "packed, three calls": [(packed_rows(3), 1), (packed_rows(2), 1), (packed_rows(1), 1)],
}
"""Over 2 or 4 shares of the data each has an uneven end; in some of the three calls of an accumulation ranks have no micro-batch at all."""


def save_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter by peft itself, none of whose matrices is zero."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(11)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def oracle_of_batch(folder: Path, adapter: Path | None, name: str, max_norm: float) -> dict[str, Any]:
    """Of one of `BATCHES`."""
    return oracle(folder, adapter, [row for rows, _ in BATCHES[name] for row in rows], max_norm, padded=name.startswith("padded"))


def oracle(
    folder: Path, adapter: Path | None, rows: Sequence[PackedRow], max_norm: float, *, padded: bool = False, attention: str = "sdpa"
) -> dict[str, Any]:
    """Transformers' own attention, torch's own cross-entropy: documents one by one, or `padded` to one batch with a mask."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    weight = sum(row.loss_weight for row in rows)
    total = 0.0
    for part in [rows] if padded else [[one] for row in rows for one in _documents(row)]:
        loss = _padded_loss(model, part)
        (loss / weight).backward()
        total += float(loss.detach())
    names = _saved_names(model) if adapter is not None else {}
    trained = {names.get(id(value), name): value for name, value in model.named_parameters() if value.requires_grad}
    norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), max_norm))
    return {
        "loss": total,
        "num_loss_tokens": sum(row.num_loss_tokens for row in rows),
        "weight": weight,
        "norm": norm,
        "gradients": {name: parameter.grad.numpy() for name, parameter in trained.items()},
    }


def _saved_names(model: peft.PeftModel) -> dict[int, str]:
    """Of each trained parameter (by id) the name that peft gives it in files."""
    by_place = {value.data_ptr(): id(value) for value in model.parameters() if value.requires_grad}
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {by_place[value.data_ptr()]: name for name, value in saved.items()}


def _documents(row: PackedRow) -> list[PackedRow]:
    bounds = np.cumsum([0, *row.seq_lens])
    weights = row.loss_weights
    return [
        PackedRow(
            input_ids=row.input_ids[start:stop],
            labels=row.labels[start:stop],
            seq_lens=np.array([stop - start], dtype=np.int32),
            sample_ids=row.sample_ids[:1],
            loss_weights=None if weights is None else weights[start:stop],
        )
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _padded_loss(model: Any, documents: Sequence[PackedRow]) -> torch.Tensor:
    """Weighted sum of the token losses of one document a line."""
    longest = max(len(document.input_ids) for document in documents)

    def lines(arrays: Sequence[np.ndarray], fill: float) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.pad(array, (0, longest - len(array)), constant_values=fill) for array in arrays]))

    ids, labels = (lines([getattr(one, field) for one in documents], fill).long() for field, fill in (("input_ids", 0), ("labels", IGNORE)))
    mask = lines([np.ones(len(one.input_ids), dtype=np.int64) for one in documents], 0)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    ones = [np.ones(len(one.input_ids), dtype=np.float32) if one.loss_weights is None else one.loss_weights for one in documents]
    return (losses * lines(ones, 0).flatten()).sum()


def assert_same(got: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    """Losses, weights, norms, and each gradient within `rtol` of its largest value."""
    assert got["num_loss_tokens"] == expected["num_loss_tokens"]
    assert got["loss"] == pytest.approx(expected["loss"], rel=rtol)
    assert got["weight"] == pytest.approx(expected["weight"], rel=1e-6)
    assert got["norm"] == pytest.approx(expected["norm"], rel=rtol)
    if got["gradients"]:
        assert got["gradients"].keys() == expected["gradients"].keys()
        for name, value in expected["gradients"].items():
            np.testing.assert_allclose(got["gradients"][name], value, rtol=rtol, atol=rtol * np.abs(value).max(), err_msg=name)
