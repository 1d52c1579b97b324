"""The dataset that keeps rows as they were read, and does the work when one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy

from twinkle_core.dataset.dataset import Dataset
from twinkle_core.dataset.encoding import LocatedRow, prompt_feature
from twinkle_core.dataset.input_feature import InputFeature
from twinkle_core.dataset.meta import Row
from twinkle_core.dataset.operations import Operation, apply_all
from twinkle_core.errors import ConfigError, DataError


class LazyDataset(Dataset):
    """Gives the items that `Dataset` gives, each mapped and encoded when it is read, every time anew.

    `filter` and `check` are done at once, since they decide how many rows there are. For the same reason the template may neither
    split nor drop rows. An error of a row is raised where the row is read, and names it.
    """

    def encode(
        self, add_generation_prompt: bool = False, num_proc: int | None = None, *, batched: bool = True, load_from_cache_file: bool = False
    ) -> None:
        """Items are `InputFeature`s from here on. Arguments as in `Dataset.encode`; `num_proc` changes nothing here.

        Raises `ConfigError` where the template splits, drops or skips rows.
        """
        self._refuse_encoded("encode")
        encoder = self._row_encoder(add_generation_prompt)
        config = self.template.config  # type: ignore[union-attr]  # _row_encoder has looked
        if config.truncation in ("split", "delete") or encoder.skip:
            what = f"on_bad_row '{config.on_bad_row}'" if encoder.skip else f"truncation '{config.truncation}'"
            raise ConfigError(f"LazyDataset cannot know how many rows {what} will leave: use Dataset, or check() and another setting")
        self._encoder = encoder

    def _item(self, number: int) -> Row | InputFeature:
        (located,) = self._current([self._rows[0][number]])
        if self._encoder is None:
            return located.row
        (row,) = self._encoder.encode([located])
        return prompt_feature(row.samples[0], row.prompt)

    def _add(self, operation: Operation) -> None:
        if operation.kind == "filter":
            operations = [*self._operations, operation]
            kept = [zip(rows, self._apply(operations, list(_copies(rows))), strict=True) for rows in self._rows]
            self._rows = [[located for located, row in rows if row is not None] for rows in kept]
        self._operations.append(operation)

    def _current(self, rows: Iterable[LocatedRow]) -> Iterator[LocatedRow]:
        for located in _copies(rows):
            row = apply_all(self._operations, *located)
            if row is None:
                raise DataError(f"{located.where}: a map left the row out, which LazyDataset cannot do: use filter, or Dataset")
            yield located._replace(row=row)


def _copies(rows: Iterable[LocatedRow]) -> Iterator[LocatedRow]:
    """So that a function that changes its row in place finds it unchanged the next time."""
    return (located._replace(row=deepcopy(located.row)) for located in rows)
