"""Models for sequences: a head that scores documents, the losses that learn from its scores, and transformers itself as the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from tests.model.tiny_models import packed_row, save_model
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.model import TransformersModel
from twinkle_core.types import DocumentKind, PackedRow

SCORED = "AutoModelForSequenceClassification"
PAIR = (int(DocumentKind.CHOSEN), int(DocumentKind.REJECTED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "llama")


def build(folder: Path, num_labels: int = 1, **settings: int) -> TransformersModel:
    model = TransformersModel(folder, model_cls=SCORED, num_labels=num_labels, **settings)
    model.set_optimizer("SGD", lr=0.0)
    return model


def pairs() -> list[PackedRow]:
    """Five pairs in three rows; which tokens are supervised does not matter, and in the last row none is."""
    lengths = ((5, 7, 3, 4), (6, 2, 9, 8), (4, 4))
    rows = [packed_row(*given, seed=index, learn_nothing=index == 2) for index, given in enumerate(lengths)]
    return [replace(row, kinds=np.array(PAIR * (len(row.seq_lens) // 2), dtype=np.int8)) for row in rows]


def oracle(model: TransformersModel, rows: list[PackedRow], tmp_path: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """transformers' model of the saved weights, and its scores, one document at a time, none packed."""
    saved = model.save("oracle", tmp_path, save_optimizer=False)
    theirs = AutoModelForSequenceClassification.from_pretrained(saved)
    assert theirs.config.architectures == ["LlamaForSequenceClassification"]
    documents = [part for row in rows for part in np.split(row.input_ids, np.cumsum(row.seq_lens)[:-1])]
    return theirs, torch.cat([theirs(input_ids=torch.from_numpy(part.astype(np.int64))[None]).logits for part in documents])


def norm_of(module: torch.nn.Module) -> float:
    return float(torch.stack([parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]).norm())


@pytest.mark.parametrize("size", [1, 3])
def test_a_reward_model_learns_that_the_chosen_answer_is_above_the_rejected_one(folder: Path, tmp_path: Path, size: int) -> None:
    rows = pairs()
    model = build(folder)
    theirs, scores = oracle(model, rows, tmp_path)
    found = model.forward_only(rows, task="scores", micro_batch_size=size)
    np.testing.assert_allclose(np.concatenate([row["scores"] for row in found]), scores[:, 0].detach(), rtol=1e-4, atol=1e-6)
    expected = -logsigmoid(scores[0::2, 0] - scores[1::2, 0]).mean()
    expected.backward()
    model.set_loss("RewardModelLoss")
    output = model.forward_backward(rows, micro_batch_size=size)
    assert output.loss == pytest.approx(expected.item(), rel=1e-5) and output.loss_weight == 5
    assert model.clip_grad_and_step(1e9) == pytest.approx(norm_of(theirs), rel=1e-4)


def test_a_regression_learns_several_numbers_of_each_document(folder: Path, tmp_path: Path) -> None:
    rows = [packed_row(5, 7), packed_row(4, seed=1)]
    targets = [np.array([[1.0, 0.0, 2.0], [0.5, 0.5, 0.5]]), np.array([[0.0, 1.0, 0.0]])]
    model = build(folder, num_labels=3)
    theirs, scores = oracle(model, rows, tmp_path)
    expected = (scores - torch.from_numpy(np.concatenate(targets)).float()).square().mean(dim=1).mean()
    expected.backward()
    model.set_loss("MSELoss")
    output = model.forward_backward(rows, targets=targets)
    assert output.loss == pytest.approx(expected.item(), rel=1e-5) and output.loss_weight == 3
    assert model.clip_grad_and_step(1e9) == pytest.approx(norm_of(theirs), rel=1e-4)


def test_an_adapter_trains_the_new_head_with_it_and_comes_back(folder: Path, tmp_path: Path) -> None:
    def adapted() -> TransformersModel:
        model = TransformersModel(folder, model_cls=SCORED, num_labels=1, seed=3)
        model.add_adapter_to_model("default", peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["score"]))
        model.set_loss("RewardModelLoss")
        model.set_optimizer("AdamW", lr=1e-2)
        return model

    model, rows = adapted(), pairs()
    losses = []
    for _ in range(6):
        losses.append(model.forward_backward(rows).loss)
        model.clip_grad_and_step()
    assert losses[-1] < losses[0]
    assert any("score" in name for name in model.get_state_dict())
    saved = model.save("adapter", tmp_path)
    again = adapted()
    again.resume_from_checkpoint(saved)
    for mine, theirs in zip(model.forward_only(rows, task="scores"), again.forward_only(rows, task="scores"), strict=True):
        np.testing.assert_array_equal(mine["scores"], theirs["scores"])
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification has a head that its weights lack.*modules_to_save=\['score'\]"):
        TransformersModel(folder, model_cls=SCORED).add_adapter_to_model("x", peft.LoraConfig(r=2, target_modules=["q_proj"]))


def test_the_head_that_a_folder_lacks_is_drawn_from_the_seed_and_one_that_it_has_is_read(folder: Path, tmp_path: Path) -> None:
    heads = [build(folder, seed=seed).get_state_dict()["score.weight"] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2]) and heads[0].std() > 0
    saved = build(folder, seed=1).save("scored", tmp_path)
    assert saved is not None
    np.testing.assert_array_equal(build(saved, seed=2).get_state_dict()["score.weight"], heads[0])


def test_a_loss_and_a_model_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="scores are asked of LlamaForCausalLM, which has no head for them: build it with model_cls="):
        TransformersModel(folder).set_loss("RewardModelLoss")
    with pytest.raises(ConfigError, match="scores are asked of LlamaForCausalLM"):
        TransformersModel(folder).forward_only([packed_row(4)], task="scores")
    model = build(folder, num_labels=2)
    for use in (lambda: model.forward_backward(pairs()), lambda: model.set_loss("DPOLoss"), lambda: model.forward_only(pairs())):
        with pytest.raises(ConfigError, match=r"log_probs are asked of LlamaForSequenceClassification, which gives scores alone"):
            use()
    model.set_loss("RewardModelLoss")
    with pytest.raises(DataError, match=r"scores have the shape \(4, 2\) for 4 documents; one each"):
        model.forward_backward(pairs())
