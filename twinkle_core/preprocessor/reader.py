"""One source's rows as trajectories, with the count of what happened to each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from twinkle_core.config import SourceConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.base import DataFilter, Preprocessor
from twinkle_core.preprocessor.fields import Row
from twinkle_core.preprocessor.formats import TRAJECTORY_KEYS, convert, detect, unused_keys
from twinkle_core.preprocessor.lines import content_of
from twinkle_core.preprocessor.registry import build_preprocessor
from twinkle_core.preprocessor.sources import Place, Source, open_source
from twinkle_core.types import Progress, Trajectory, kind_of

MAX_LISTED = 20
"""Skipped rows listed in the report, per source; all are counted."""

ROWS_BETWEEN_REPORTS = 256


@dataclass(kw_only=True)
class Counts:
    """What became of a source's rows. Each row is in exactly one of the numbers that `parts` adds up."""

    rows: int = 0
    skipped: int = 0
    dropped: int = 0
    """Left out by the processor, which returned None."""
    filtered: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    left_out: int = 0
    """Left over by a weighted mix."""
    train: int = 0
    held_out: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Of the rows that pass the filters."""
    ignored_keys: Counter[str] = field(default_factory=Counter)
    skipped_rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """The rows accounted for: equal to `rows` once the stage is done."""
        return self.skipped + self.dropped + self.filtered.total() + self.duplicates + self.left_out + self.train + self.held_out

    def report(self, layout: str) -> dict[str, Any]:
        """As the stage's report shows them."""
        numbers = {name: getattr(self, name) for name in ("rows", "skipped", "dropped", "duplicates", "left_out", "train", "held_out")}
        tables = {name: dict(sorted(getattr(self, name).items())) for name in ("kinds", "ignored_keys")}
        return {"format": layout, **numbers, "filtered": dict(self.filtered), **tables, "skipped_rows": self.skipped_rows}


class SourceReader:
    """Renames, processes, converts and filters the rows of one source."""

    def __init__(
        self,
        config: SourceConfig,
        filters: Mapping[str, DataFilter],
        *,
        skip: bool,
        source: Source | None = None,
        cache: Path | None = None,
        trusted_code: Path | None = None,
    ) -> None:
        self.config, self.filters, self.skip = config, filters, skip
        self.source = source or open_source(config, cache=cache)
        self.processor = build_preprocessor(config.processor, config.processor_args, trusted_code)
        if config.uri == "builtin://self_cognition" and self.processor is None:
            raise ConfigError(
                f"source '{config.name}': builtin://self_cognition holds the placeholders {{name}} and {{author}}; "
                "set processor to SelfCognitionProcessor with processor_args name and author"
            )
        self.format: str = config.format
        self.counts = Counts()
        self._names: Sequence[str] = list(filters)
        self._renamed: set[str] = set()

    def trajectories(self, progress: Progress) -> Iterator[tuple[Trajectory, bytes]]:
        """Those that pass all filters, in order, each with its `content_of`; a bad row raises, or is counted and listed."""
        counts, shown = self.counts, 0
        for place, row in islice(self.source.rows(self._refuse_unread), self.config.limit):
            counts.rows += 1
            if counts.rows - shown >= ROWS_BETWEEN_REPORTS:
                progress.advance(counts.rows - shown)
                shown = counts.rows
            try:
                made = self._convert(row, place)
            except DataError as error:
                self._refuse(place, str(error))
                continue
            if made is not None:
                yield made
        progress.advance(counts.rows - shown)
        if missing := set(self.config.columns) - self._renamed:
            raise DataError(f"source '{self.config.name}': columns names {sorted(missing)}, which no row has")
        if counts.rows == counts.skipped:
            raise DataError(f"source '{self.config.name}': none of its {counts.rows} rows can be used: {counts.skipped_rows}")

    def _convert(self, row: dict[str, Any], place: Place) -> tuple[Trajectory, bytes] | None:
        counts = self.counts
        given: Row = self._rename(row) if self.config.columns else row
        if self.processor is not None:
            made = self._process(self.processor, given, place)
            if made is None:
                counts.dropped += 1
                return None
            given = made
        layout = self._layout(given)
        trajectory = convert(given, layout)
        if self.processor is not None:
            trajectory = self.processor.annotate(trajectory)
        kind = kind_of(trajectory)
        kept = self._filter(trajectory, place) if self.filters else trajectory
        if kept is None:
            return None
        content = content_of(kept)
        counts.kinds[kind] += 1
        if keys := unused_keys(given, layout):
            counts.ignored_keys.update(keys)
        return kept, content

    def _rename(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = self.config.columns
        self._renamed |= columns.keys() & row.keys()
        renamed: dict[str, Any] = {}
        for key, value in row.items():
            name = columns.get(key, key)
            if renamed.get(name) is not None and value is not None:
                raise DataError(f"'{name}' is there twice once columns are renamed ({columns})")
            if name not in renamed or value is not None:
                renamed[name] = value
        return renamed

    def _process(self, processor: Preprocessor, row: Row, place: Place) -> Row | None:
        try:
            made = processor(row)
        except Exception as error:
            error.add_note(f"in processor {self.config.processor} of source '{self.config.name}', {place}")
            raise
        if made is not None and not isinstance(made, dict):
            raise ConfigError(f"processor {self.config.processor} returned {type(made).__name__}; it has to return a row or None")
        return made

    def _layout(self, row: Row) -> str:
        """A processor's trajectory is read as one; else the layout that is named, or that the first row has."""
        if self.processor is not None and isinstance(row.get("messages"), list) and row.keys() <= TRAJECTORY_KEYS:
            layout = "trajectory"
        else:
            layout = detect(row) if self.format == "auto" else self.format
        if self.format == "auto":
            self.format = layout
        return layout

    def _filter(self, trajectory: Trajectory, place: Place) -> Trajectory | None:
        kept: Trajectory | None = trajectory
        for name in self._names:
            try:
                kept = self.filters[name].apply(trajectory)
            except Exception as error:
                error.add_note(f"in filter {name}, source '{self.config.name}', {place}")
                raise
            if kept is None:
                self.counts.filtered[name] += 1
                return None
            trajectory = kept
        return kept

    def _refuse_unread(self, place: Place, reason: str) -> None:
        self.counts.rows += 1
        self._refuse(place, reason)

    def _refuse(self, place: Place, reason: str) -> None:
        if not self.skip:
            raise DataError(f"source '{self.config.name}', {place}: {reason} (on_bad_row='skip' would count and leave out such rows)")
        self.counts.skipped += 1
        if len(self.counts.skipped_rows) < MAX_LISTED:
            self.counts.skipped_rows.append({"file": place.file, place.kind: place.number, "reason": reason})
