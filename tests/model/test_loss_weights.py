"""A turn's weight multiplies its tokens' losses, and the step divides by the sum of the weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model.test_transformers_model import assert_same_gradient, build, gradient
from tests.model.tiny_models import batch, packed_row, save_model
from twinkle_core.types import IGNORE, PackedRow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def weighed(row: PackedRow, weight: float) -> PackedRow:
    return replace(row, loss_weights=np.full(len(row.input_ids), weight, dtype=np.float32))


def test_the_gradient_is_the_weighted_mean_of_the_tokens_gradients(folder: Path, tmp_path: Path) -> None:
    one, two = batch(2)
    (first, _, n), (second, _, m) = (gradient(build(folder), [[row]], tmp_path / str(i)) for i, row in enumerate((one, two)))
    found, _, _ = gradient(build(folder), [[weighed(one, 3.0), two]], tmp_path / "both", micro_batch_size=2)
    expected = {name: (3 * n * first[name] + m * second[name]) / (3 * n + m) for name in first}
    assert_same_gradient(found, expected)
    unweighted, _, _ = gradient(build(folder), [[one, two]], tmp_path / "plain")
    assert max(np.abs(found[name] - unweighted[name]).max() for name in found) > 1e-4, "the weights have no effect"


def test_loss_and_weight_of_a_step_are_sums_over_micro_batches(folder: Path) -> None:
    one, two = batch(2)
    losses = [row["loss_sum"] for row in build(folder).forward_only([one, two])]
    output = build(folder).forward_backward([weighed(one, 0.25), weighed(two, 2.0)], micro_batch_size=1)
    assert output.loss_sum == pytest.approx(0.25 * losses[0] + 2.0 * losses[1], rel=1e-5)
    assert output.loss_weight == 0.25 * one.num_loss_tokens + 2.0 * two.num_loss_tokens
    assert output.num_loss_tokens == one.num_loss_tokens + two.num_loss_tokens
    assert output.loss == output.loss_sum / output.loss_weight


def test_weights_that_are_all_equal_change_nothing(folder: Path, tmp_path: Path) -> None:
    rows = batch(3)
    plain, _, _ = gradient(build(folder), [rows], tmp_path / "plain")
    halved, _, _ = gradient(build(folder), [[weighed(row, 0.5) for row in rows]], tmp_path / "halved")
    assert_same_gradient(halved, plain)


def test_a_token_of_weight_zero_is_as_good_as_not_learnt(folder: Path, tmp_path: Path) -> None:
    row = packed_row(12)
    half = len(row.input_ids) // 2
    weights = np.ones(len(row.input_ids), dtype=np.float32)
    weights[half:] = 0
    labels = np.where(np.arange(len(weights)) < half, row.labels, IGNORE).astype(np.int32)
    found, _, _ = gradient(build(folder), [[replace(row, loss_weights=weights)]], tmp_path / "weights")
    expected, _, _ = gradient(build(folder), [[replace(row, labels=labels)]], tmp_path / "labels")
    assert_same_gradient(found, expected)
