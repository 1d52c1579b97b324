"""Weights and optimizer states survive any change of the number of ranks, to the bit, whole or in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.bodies import accumulate, built
from tests.parallel.models import packed_micro_batches, save_model
from tests.parallel.ranks import run_ranks
from twinkle_core.errors import DamagedError, DataError
from twinkle_core.model.optimizer import Optimizer
from twinkle_core.model.parallel.fully_sharded import ShardingSettings
from twinkle_core.model.parallel.layout import Layout
from twinkle_core.model.parallel.sharded_files import read_parts, write_parts

SETTINGS = ShardingSettings()


def state(rank: int, folder: Path, layout: Layout) -> tuple[Any, Any, Optimizer, dict[str, torch.Tensor]]:
    model, placement = built(rank, folder, layout, SETTINGS)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer("AdamW", parameters, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})
    tensors = {**parameters, **{f"optimizer.{name}": tensor for name, tensor in optimizer.tensors().items()}}
    return model, placement, optimizer, tensors


def whole(placement: Any, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in placement.gather(tensors).items()}


def train(rank: int, folder: Path, layout: Layout, start: Path | None, end: Path | None, num_steps: int) -> dict[str, np.ndarray]:
    """Steps from `start` (parts) or the base model, and writes `end`. Gives the whole state (rank 0)."""
    model, placement, optimizer, tensors = state(rank, folder, layout)
    if start is not None:
        read_parts(start, tensors)
    gradients = placement.gradients(dict(model.named_parameters()))
    for _ in range(num_steps):
        accumulate(model, placement, gradients, packed_micro_batches(3))
        gradients.normalise_and_clip(gradients.reduce(), 1.0)
        optimizer.step()
        gradients.zero()
    if end is not None:
        write_parts(end, tensors, rank, layout.world_size)
    return whole(placement, tensors)


def scatter_and_gather(rank: int, folder: Path, layout: Layout, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    _, placement, _, tensors = state(rank, folder, layout)
    placement.scatter({name: torch.from_numpy(value) for name, value in values.items()}, tensors)
    return whole(placement, tensors)


def assert_equal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def chain(folder: Path, tmp_path: Path, layouts: list[Layout]) -> None:
    """Trains on the first layout, then hands the parts from one to the next: read, compare to the bit, write."""
    parts = [tmp_path / f"parts-{index}" for index in range(len(layouts))]
    for part in parts:
        part.mkdir()
    expected = run_ranks(layouts[0].world_size, train, tmp_path, folder, layouts[0], None, parts[0], 2)[0]
    assert any(np.abs(value).max() > 0 for name, value in expected.items() if name.endswith("exp_avg_sq"))
    assert float(expected["optimizer.model.norm.weight.step"]) == 2
    for index in range(1, len(layouts)):
        layout = layouts[index]
        assert_equal(run_ranks(layout.world_size, train, tmp_path, folder, layout, parts[index - 1], parts[index], 0)[0], expected)
        assert_equal(run_ranks(layout.world_size, scatter_and_gather, tmp_path, folder, layout, expected)[0], expected)
    assert len({len(list(part.glob("part-*"))) for part in parts}) > 1


def test_two_ranks_to_one_to_two(folder: Path, tmp_path: Path) -> None:
    chain(folder, tmp_path, [Layout.from_sizes(fsdp=2), Layout.from_sizes(), Layout.from_sizes(dp=2)])


@pytest.mark.slow
def test_four_ranks_to_two_to_one_to_three(folder: Path, tmp_path: Path) -> None:
    sizes = [{"dp": 2, "fsdp": 2}, {"fsdp": 2}, {}, {"fsdp": 3}, {"fsdp": 2, "tp": 2}, {"tp": 2}]
    layouts = [Layout.from_sizes(**given) for given in sizes]
    chain(folder, tmp_path, layouts)


def test_training_goes_on_from_parts_as_if_never_interrupted(folder: Path, tmp_path: Path) -> None:
    layout, parts = Layout.from_sizes(fsdp=2), tmp_path / "parts"
    parts.mkdir()
    whole_run = run_ranks(2, train, tmp_path, folder, layout, None, None, 3)[0]
    run_ranks(2, train, tmp_path, folder, layout, None, parts, 1)
    assert_equal(run_ranks(2, train, tmp_path, folder, layout, parts, None, 2)[0], whole_run)


def test_damage_is_named(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3.0)}
    write_parts(tmp_path, tensors, 0, 1)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_parts(tmp_path, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(DataError, match=r"b is unexpected; a is torch.float32 \[2, 3\], the model has torch.float32 \[3, 2\]"):
        read_parts(tmp_path, {"a": torch.zeros(3, 2)})
    whole = (tmp_path / "index.json").read_text()
    index = json.loads(whole)
    index["tensors"]["a"]["parts"][0]["shape"] = [1, 3]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="3 of 6 values of a"):
        read_parts(tmp_path, target)
    (tmp_path / "index.json").write_text(whole)
    (tmp_path / "part-00000-of-00001.safetensors").unlink()
    with pytest.raises(DamagedError, match="part-00000-of-00001.safetensors missing"):
        read_parts(tmp_path, target)
    for text in ("[]", "{}", whole.replace('"start"', '"begin"'), whole.replace('"shape": [', '"shape": "x[')):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(DamagedError, match=r"index\.json"):
            read_parts(tmp_path, target)
    (tmp_path / "index.json").unlink()
    with pytest.raises(DamagedError, match=r"index\.json cannot be read"):
        read_parts(tmp_path, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items()), "refused, and nothing changed"
