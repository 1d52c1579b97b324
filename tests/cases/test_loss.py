"""Reported faults of loss normalisation, packing and evaluation, with their right values (the case's name is in each docstring)."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.model.test_transformers_model import assert_same_gradient, build, gradient
from tests.model.tiny_models import packed_row, save_model
from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.evaluator.held_out_loss import document_losses
from twinkle_core.types import IGNORE, EncodedSample, NoProgress, PackedRow, StepOutput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def row(*documents: list[int], learn: slice = slice(None)) -> PackedRow:
    """The documents in one row; only the labels in `learn` are kept."""
    labels = np.concatenate([[*document[1:], IGNORE] for document in documents]).astype(np.int32)
    kept = np.full_like(labels, IGNORE)
    kept[learn] = labels[learn]
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    ids = np.concatenate(documents).astype(np.int32)
    return PackedRow(input_ids=ids, labels=kept, seq_lens=lengths, sample_ids=np.arange(len(documents), dtype=np.int64))


def test_a_document_does_not_see_its_neighbour(folder: Path) -> None:
    """PK04: the losses of B are the same after A, after A2 and alone."""
    model = build(folder)
    a, a2, b = [11, 12, 13], [91, 92, 93], [21, 22, 23, 24]
    for position in range(3):
        alone = model.forward_only([row(b, learn=slice(position, position + 1))])[0]
        assert alone["num_loss_tokens"] == 1
        for first in (a, a2):
            packed = model.forward_only([row(first, b, learn=slice(3 + position, 4 + position))])[0]
            assert packed["loss_sum"] == pytest.approx(alone["loss_sum"], abs=1e-5)


def test_micro_batches_of_unlike_length_are_not_averaged_as_if_alike(folder: Path, tmp_path: Path) -> None:
    """PK07: 1, 31 and 8 tokens with losses 0.5, 2 and 1 have the mean 1.7625, not 1.1667."""
    loss_sum = 0.5 + 31 * 2.0 + 8 * 1.0
    assert StepOutput(loss_sum=loss_sum, num_loss_tokens=40, loss_weight=40.0).loss == 1.7625
    rows = [packed_row(3), packed_row(33), packed_row(10)]  # of each, the first token is a prompt and the last predicts nothing
    assert [one.num_loss_tokens for one in rows] == [1, 31, 8]
    together, _, _ = gradient(build(folder), [rows], tmp_path / "one", micro_batch_size=3)
    apart, _, _ = gradient(build(folder), [[one] for one in rows], tmp_path / "three")
    assert_same_gradient(apart, together)


def test_the_last_short_window_is_stepped_and_divided_by_what_is_in_it(folder: Path, tmp_path: Path) -> None:
    """PK09: 7 batches, 4 to a step: 2 steps an epoch, 6 in 3 epochs; the last step divides by the tokens of 3 batches."""
    rows = [packed_row(8, seed=seed) for seed in range(7)]
    assert len(DataLoader(rows, batch_size=4, num_epochs=1)) == 2
    assert len(DataLoader(rows, batch_size=4, num_epochs=3)) == 6
    windows = list(DataLoader(rows, batch_size=4, num_epochs=1))
    assert [len(window) for window in windows] == [4, 3]
    found, _, tokens = gradient(build(folder), [[one] for one in windows[1]], tmp_path / "window")
    assert tokens == sum(one.num_loss_tokens for one in windows[1]) == 18
    singles = [gradient(build(folder), [[one]], tmp_path / str(i))[0] for i, one in enumerate(windows[1])]
    assert_same_gradient(found, {name: sum(single[name] for single in singles) / 3 for name in found})


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_evaluation_does_not_depend_on_its_batches(folder: Path, batch_tokens: int) -> None:
    """PK11: documents of 2, 40, 3, 17 and 5 tokens have the same losses in batches of one, of a few and of all."""
    documents = []
    for length in (2, 40, 3, 17, 5):
        ids = np.random.default_rng(length).integers(3, 256, length).astype(np.int32)
        documents.append(EncodedSample(input_ids=ids, labels=np.append(ids[1:], IGNORE).astype(np.int32)))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = document_losses(model, documents, NoProgress(), batch_tokens=batch_tokens)
    alone = [document_losses(model, [document], NoProgress())[0] for document in documents]
    assert [loss.num_loss_tokens for loss in losses] == [1, 39, 2, 16, 4]
    np.testing.assert_allclose([loss.loss_sum for loss in losses], [loss.loss_sum for loss in alone], rtol=1e-5)
