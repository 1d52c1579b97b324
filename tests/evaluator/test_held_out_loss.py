from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from twinkle_core.errors import DataError
from twinkle_core.evaluator import held_out_loss
from twinkle_core.evaluator.held_out_loss import document_losses
from twinkle_core.types import IGNORE, EncodedSample, NoProgress

LENGTHS = (2, 40, 3, 17, 5)  # huggingface/transformers#39241


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def document(length: int, seed: int, prompt: int = 1) -> EncodedSample:
    ids = np.random.RandomState(seed).randint(3, 200, size=length).astype(np.int32)
    labels = np.full(length, IGNORE, dtype=np.int32)
    labels[prompt - 1 : -1] = ids[prompt:]
    return EncodedSample(input_ids=ids, labels=labels)


def mean(model: Any, documents: list[EncodedSample], batch_tokens: int) -> float:
    losses = document_losses(model, documents, NoProgress(), batch_tokens=batch_tokens)
    return sum(loss.loss_sum for loss in losses) / sum(loss.num_loss_tokens for loss in losses)


def test_the_loss_does_not_depend_on_the_batch(model: Any) -> None:
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = mean(model, documents, 1)
    assert alone > 0
    for batch_tokens in (20, 40, 80, 120, 10_000):
        assert mean(model, documents, batch_tokens) == pytest.approx(alone, abs=1e-5)
    means_of_documents = [mean(model, [item], 1) for item in documents]
    assert abs(sum(means_of_documents) / len(means_of_documents) - alone) > 1e-3, "the mean of means must differ here"


def test_it_is_the_cross_entropy_of_a_plain_forward_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_loss, "CHUNK_POSITIONS", 7)  # more than one chunk
    item = document(40, 1, prompt=6)
    with torch.inference_mode():
        logits_TV = model(torch.from_numpy(item.input_ids.astype(np.int64))[None]).logits[0].double()
    expected = [-torch.log_softmax(logits_TV[t], -1)[label].item() for t, label in enumerate(item.labels) if label != IGNORE]
    right = sum(int(logits_TV[t].argmax()) == label for t, label in enumerate(item.labels) if label != IGNORE)
    (loss,) = document_losses(model, [item], NoProgress())
    assert loss.num_loss_tokens == len(expected) == 34
    assert loss.loss_sum == pytest.approx(math.fsum(expected), abs=1e-4)
    assert loss.num_correct == right


def test_first_choices_are_counted(model: Any) -> None:
    ids = document(30, 2).input_ids
    with torch.inference_mode():
        choices = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].argmax(-1).numpy().astype(np.int32)
    labels = choices.copy()
    labels[-1] = IGNORE
    labels[3] = (choices[3] + 1) % 200
    (loss,) = document_losses(model, [EncodedSample(input_ids=ids, labels=labels)], NoProgress())
    assert (loss.num_correct, loss.num_loss_tokens) == (28, 29)


def test_results_keep_the_order_of_the_documents(model: Any) -> None:
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    assert [loss.num_loss_tokens for loss in document_losses(model, documents, NoProgress())] == [length - 1 for length in LENGTHS]


def test_a_document_that_learns_nothing_is_refused(model: Any) -> None:
    empty = EncodedSample(input_ids=np.arange(4, dtype=np.int32), labels=np.full(4, IGNORE, dtype=np.int32))
    with pytest.raises(DataError, match="document 1 has no supervised token"):
        document_losses(model, [document(5, 0), empty], NoProgress())
    assert document_losses(model, [], NoProgress()) == []
