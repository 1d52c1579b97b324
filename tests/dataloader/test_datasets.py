"""The loader over the data set classes, with rows of bytes as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.dataloader.resuming import assert_stopping_anywhere_changes_nothing, numbers
from tests.dataset.chats import chats
from tests.dataset.conftest import template, tokenizer  # noqa: F401 - fixtures
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta, IterableDataset, IterablePackingDataset, LazyDataset, PackingDataset

LENGTHS = np.random.default_rng(0).integers(1, 90, 40).tolist()


def made(kind: Any, template: Any, **arguments: Any) -> Any:  # noqa: F811
    dataset = kind(DatasetMeta(data=chats(LENGTHS)), **arguments)
    dataset.set_template(template)
    dataset.encode()
    if kind in (PackingDataset, IterablePackingDataset):
        dataset.pack_dataset()
    return dataset


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_epochs", [None, 2])
@pytest.mark.parametrize("kind", [IterableDataset, IterablePackingDataset])
def test_streams_resume_exactly(kind: Any, num_epochs: int | None, num_workers: int, template: Any) -> None:  # noqa: F811
    arguments = {"packing_interval": 11} if kind is IterablePackingDataset else {}

    def make() -> DataLoader:
        return DataLoader(made(kind, template, **arguments), batch_size=5, num_epochs=num_epochs, num_workers=num_workers)

    whole = assert_stopping_anywhere_changes_nothing(make, None if num_epochs else 2)
    tokens = sum(sum(batch) for _, batch in whole)
    assert tokens == 2 * sum(numbers(list(made(Dataset, template))))


@pytest.mark.parametrize("kind", [Dataset, LazyDataset, PackingDataset])
@pytest.mark.parametrize("how", [{"batch_size": 3}, {"max_tokens": 400}])
def test_numbered_rows_resume_exactly(kind: Any, how: dict[str, int], template: Any) -> None:  # noqa: F811
    dataset = made(kind, template)
    whole = assert_stopping_anywhere_changes_nothing(lambda: DataLoader(dataset, num_epochs=2, **how))
    assert sum(sum(batch) for _, batch in whole) == 2 * sum(numbers(list(made(Dataset, template))))
