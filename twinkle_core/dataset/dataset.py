"""The dataset that holds its rows: each call is done at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from operator import index as as_index
from typing import Any

import numpy as np

from twinkle_core.dataset.base import BaseDataset
from twinkle_core.dataset.columns import SampleColumns
from twinkle_core.dataset.encoding import LocatedRow, prompt_feature
from twinkle_core.dataset.input_feature import InputFeature
from twinkle_core.dataset.meta import Row, SourceRows
from twinkle_core.dataset.operations import Operation, apply_all
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.mix import mix


class Dataset(BaseDataset):
    """Rows in memory: `len`, `[i]` and iteration give dicts, and `InputFeature`s once `encode` was called.

    Example::

        dataset = Dataset(DatasetMeta('chats.jsonl'))
        dataset.set_template('Template', model_id='hf://HuggingFaceTB/SmolLM2-135M-Instruct', max_length=512)
        dataset.encode()
        dataset[0]['input_ids']
    """

    _rows: list[list[LocatedRow]]
    """By source; one list of all once they are mixed."""
    _samples: SampleColumns | None = None
    _prompts: Sequence[dict[str, Any]] = ()
    """What else each feature has, where the rows are prompts."""

    def encode(
        self, add_generation_prompt: bool = False, num_proc: int | None = None, *, batched: bool = True, load_from_cache_file: bool = False
    ) -> None:
        """Replaces the rows by their samples: one a row, more where truncation 'split' cuts it, none where it is dropped.

        `add_generation_prompt`: rows are prompts, encoded up to where the answer starts. `num_proc` processes work on it (None: this
        one alone), with the same result. `batched` and `load_from_cache_file` are Twinkle's and change nothing.
        Raises `DataError` naming the row that cannot be encoded (`report` counts it instead where the template skips bad rows), and
        where no sample is left.
        """
        self._refuse_encoded("encode")
        if num_proc is not None and num_proc < 1:
            raise ConfigError(f"num_proc is {num_proc}, but must be at least 1")
        encoder, reports = self._row_encoder(add_generation_prompt), deepcopy(self._reports)
        samples, prompts = SampleColumns(), []
        for row in encoder.encode_blocks(self._rows[0], num_proc or 1):
            row.count(reports[row.source])
            for sample in row.samples:
                samples.append(sample)
                prompts.append(row.prompt)
        if not len(samples):
            raise DataError(f"no sample is left to learn from: {[report.plain() for report in reports]}")
        self._encoder, self._reports = encoder, reports
        self._samples, self._prompts = samples, prompts if add_generation_prompt else ()
        self._rows = [[]]

    def check(self, add_generation_prompt: bool = False) -> None:
        """Leaves out the rows that cannot be encoded; `report` counts and lists them with the reason."""
        self._refuse_encoded("check")
        encoder = self._row_encoder(add_generation_prompt, skip=True)
        kept = []
        for located, row in zip(self._rows[0], encoder.encode_blocks(self._current(self._rows[0]), 1), strict=True):
            if row.outcome is None:
                row.count(self._reports[row.source])
            else:
                kept.append(located)
        self._rows = [kept]

    @property
    def num_tokens(self) -> np.ndarray | None:
        """[N] int64 tokens of each item, for batches of a number of tokens; None where that is not known yet."""
        return None if self._samples is None else self._samples.lengths()

    def __len__(self) -> int:
        self._check_mixed()
        return len(self._samples) if self._samples is not None else len(self._rows[0])

    def __getitem__(self, index: int) -> Row | InputFeature:
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self._item(number % len(self))

    def __iter__(self) -> Iterator[Row | InputFeature]:
        return (self._item(number) for number in range(len(self)))

    def _item(self, number: int) -> Row | InputFeature:
        if self._samples is None:
            return self._rows[0][number].row
        return prompt_feature(self._samples[number], self._prompts[number] if self._prompts else {})

    def _open(self, source: int) -> None:
        name = self._names()[source]
        rows = SourceRows(self._metas[source], self._cache_dir).read()
        self._rows = [*(self._rows if source else []), [LocatedRow(source, f"{name}, {place}", row) for place, row in rows]]
        self._reports[source].rows = len(rows)

    def _mixed(self) -> None:
        parts = [iter(rows) for rows in self._rows]
        order = mix([len(rows) for rows in self._rows], self._mix or "concatenate")
        self._rows = [[next(parts[source]) for source in order]]

    def _add(self, operation: Operation) -> None:
        changed = [zip(rows, self._apply([operation], rows), strict=True) for rows in self._rows]
        self._rows = [[located._replace(row=row) for located, row in rows if row is not None] for rows in changed]

    def _apply(self, operations: Sequence[Operation], rows: Sequence[LocatedRow]) -> list[Row | None]:
        """What the operations make of each row; those that one leaves out are counted."""
        results = [apply_all(operations, *located) for located in rows]
        for located, result in zip(rows, results, strict=True):
            self._reports[located.source].filtered += result is None
        return results

    def _current(self, rows: Iterable[LocatedRow]) -> Iterator[LocatedRow]:
        """The rows as they are after the calls so far."""
        return iter(rows)

    def _rows_to_save(self) -> Iterator[Mapping[str, Any]]:
        return iter(self)
