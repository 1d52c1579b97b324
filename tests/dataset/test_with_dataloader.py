"""Every dataset under the `DataLoader`: batches of features, stopped after any of them and gone on with."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from tests.dataset.chats import chats, plain
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta, IterableDataset, IterablePackingDataset, LazyDataset, PackingDataset

LENGTHS = [number * 37 % 150 for number in range(41)]
CLASSES = [Dataset, LazyDataset, PackingDataset, IterableDataset, IterablePackingDataset]


def made(cls: Any, template: Any, **arguments: Any) -> Any:
    dataset = cls(DatasetMeta(data=chats(LENGTHS)), **arguments)
    dataset.set_template(template)
    dataset.encode()
    if hasattr(dataset, "pack_dataset"):
        dataset.pack_dataset()
    return dataset


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_stopped_after_any_batch_goes_on_as_if_it_were_not(cls: Any, num_workers: int, template: Any) -> None:
    def loader() -> DataLoader:
        return DataLoader(made(cls, template), batch_size=4, num_epochs=2, num_workers=num_workers)

    batches = [plain(batch) for batch in loader()]
    documents = [length for feature in chain(*batches) for length in feature["seq_lens"]]
    assert sorted(documents) == sorted(2 * [24 + length for length in LENGTHS]), "each sample once in each epoch"
    for stop in range(1, len(batches), 4):
        first, other = loader(), loader()
        before = []
        for batch in first:
            before.append(plain(batch))
            if len(before) == stop:
                state = json.loads(json.dumps(first.state_dict()))
                break
        other.load_state_dict(state)
        assert before + [plain(batch) for batch in other] == batches


@pytest.mark.parametrize("cls", [Dataset, PackingDataset])
def test_batches_of_a_number_of_tokens(cls: Any, template: Any) -> None:
    dataset = made(cls, template)
    assert dataset.num_tokens.tolist() == [feature["length"] for feature in dataset]
    batches = list(DataLoader(dataset, max_tokens=500, num_epochs=1))
    assert all(sum(feature["length"] for feature in batch) <= 500 for batch in batches)
    assert sum(len(batch) for batch in batches) == len(dataset)


def test_a_cyclic_stream_feeds_a_loader_without_end(template: Any) -> None:
    loader = DataLoader(made(IterablePackingDataset, template, cyclic=True, packing_interval=8), batch_size=4)
    num_steps = 0
    for _ in loader:
        num_steps += 1
        if num_steps == 50:
            break
    assert num_steps == 50
