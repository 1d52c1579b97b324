"""Rows for those who write the training loop themselves: from a source to features, in memory, lazily or as a stream."""

from twinkle_core.dataset.base import BaseDataset
from twinkle_core.dataset.dataset import Dataset
from twinkle_core.dataset.input_feature import InputFeature, encoded_sample, input_feature
from twinkle_core.dataset.iterable_dataset import IterableDataset
from twinkle_core.dataset.iterable_packing_dataset import IterablePackingDataset
from twinkle_core.dataset.lazy_dataset import LazyDataset
from twinkle_core.dataset.meta import DatasetMeta
from twinkle_core.dataset.packing_dataset import PackingDataset
from twinkle_core.dataset.sources import Source, open_source

__all__ = [
    "BaseDataset",
    "Dataset",
    "DatasetMeta",
    "InputFeature",
    "IterableDataset",
    "IterablePackingDataset",
    "LazyDataset",
    "PackingDataset",
    "Source",
    "encoded_sample",
    "input_feature",
    "open_source",
]
