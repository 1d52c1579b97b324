"""The dataset whose items are packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_core.dataset.columns import packed_row
from twinkle_core.dataset.dataset import Dataset
from twinkle_core.dataset.input_feature import InputFeature, input_feature
from twinkle_core.dataset.meta import DatasetMeta, Row
from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_core.packing import PackingPlan


class PackingDataset(Dataset):
    """A `Dataset` that fills rows of the template's `max_length` with whole samples, so that few tokens of a batch are empty.

    After `encode` and `pack_dataset`, `[i]` is a row of several documents, whose positions restart at each; `seq_lens` keeps them
    apart. `packing_num_proc` is Twinkle's: packing takes one process and far less time than encoding, and the plan depends on the
    lengths alone.
    """

    _plan: PackingPlan | None = None

    def __init__(self, dataset_meta: DatasetMeta | None = None, packing_num_proc: int = 1, *, cache_dir: Path | str | None = None) -> None:
        if packing_num_proc < 1:
            raise ConfigError(f"packing_num_proc is {packing_num_proc}, but must be at least 1")
        super().__init__(dataset_meta, cache_dir=cache_dir)

    def pack_dataset(self) -> None:
        """Plans the rows: best-fit-decreasing over all samples, each in exactly one row. Call it after `encode`."""
        from twinkle_core.packing import pack

        if self._samples is None or self.template is None:
            raise ConfigError("pack_dataset comes after encode")
        if self._plan is not None:
            raise ConfigError("the dataset is packed already")
        if self._samples.with_images:
            raise ConfigError("samples with images are not packed: use Dataset or LazyDataset for them")
        if self._prompts:
            raise ConfigError("prompts are to be answered one by one and are not packed: use Dataset")
        self._plan = pack(self._samples.lengths(), self.template.config.max_length)

    @property
    def report(self) -> dict[str, Any]:
        """As of `Dataset`; once packed also 'packed_rows' and 'fill', the share of the rows that is taken by tokens."""
        report = super().report
        if self._plan is None or self.template is None:
            return report
        rows = len(self._plan)
        return {**report, "packed_rows": rows, "fill": round(report["tokens"] / (rows * self.template.config.max_length), 6)}

    @property
    def num_tokens(self) -> np.ndarray | None:
        """[N] int64 tokens of each packed row, or of each sample before `pack_dataset`."""
        lengths = super().num_tokens
        return lengths if lengths is None or self._plan is None else np.add.reduceat(lengths[self._plan.items], self._plan.offsets[:-1])

    def __len__(self) -> int:
        if self._samples is not None and self._plan is None:
            raise ConfigError("call pack_dataset after encode; Dataset gives the samples one by one")
        return super().__len__() if self._plan is None else len(self._plan)

    def _item(self, number: int) -> Row | InputFeature:
        if self._plan is None:
            return super()._item(number)
        numbers = self._plan[number]
        samples = self._samples
        assert samples is not None  # or there were no plan
        return input_feature(packed_row([samples[int(at)] for at in numbers], numbers))
