"""The dataset that is read as a stream, and goes on exactly where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_core.dataset.base import BaseDataset
from twinkle_core.dataset.encoding import EncodedRow, blocks, prompt_feature
from twinkle_core.dataset.input_feature import InputFeature
from twinkle_core.dataset.meta import DatasetMeta, Row, SourceRows
from twinkle_core.dataset.operations import Operation
from twinkle_core.dataset.report import SourceReport
from twinkle_core.dataset.stream import Cursor, RowStream, Step
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.multimodal import MultimodalSample
from twinkle_core.types import EncodedSample

LOOK_AHEAD_ROWS = 32
"""Rows that are tokenized together, and so the most that are in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place between two items of the stream."""

    cursor: Cursor
    """Before the row that comes next, or of which some items were handed out."""
    items: int = 0
    """How many of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """One item of a row, or that the row has none."""

    content: Row | EncodedSample | MultimodalSample | None
    prompt: dict[str, Any] = field(default_factory=dict)
    origin: tuple[int, int, int]
    """Number of the source, of the row in it, and of the item among those of the row, all from 0."""
    after: Position


class IterableDataset(BaseDataset):
    """Rows read, mapped, filtered and encoded on the way, 32 at a time: for data that does not fit into memory. No `len`, no `[i]`.

    Each `for` loop is one pass over all rows. `state_dict()` says after which item the latest loop stands, as plain JSON, and at the
    end of a loop where the next one begins; another object built by the same calls that is given it by `load_state_dict` starts its
    next loop there, and gives the same items as this one would have. Rows before that place are read again, but not converted.
    `report` counts the rows of the latest pass.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, *, cache_dir: Any = None) -> None:
        self._sources: list[SourceRows] = []
        self._skip_bad = False
        self._next: Mapping[str, Any] | None = None
        self._iteration = object()
        self._position = Position(cursor=Cursor(rows=()))
        super().__init__(dataset_meta, cache_dir=cache_dir)

    def encode(self, add_generation_prompt: bool = False, *, batched: bool = True, load_from_cache_file: bool = False) -> None:
        """Items are `InputFeature`s from here on: one a row, more where truncation 'split' cuts it, none where it is dropped.

        Arguments as in `Dataset.encode`. A bad row raises `DataError` when its turn comes; `report` counts it instead where the
        template skips bad rows or `check` was called.
        """
        self._refuse_encoded("encode")
        self._encoder = self._row_encoder(add_generation_prompt, skip=True if self._skip_bad else None)

    def check(self) -> None:
        """Rows that cannot be encoded are left out when their turn comes; `report` counts and lists them."""
        self._refuse_encoded("check")
        self._skip_bad = True

    def __iter__(self) -> Iterator[Row | InputFeature]:
        self._check_mixed()
        self._restore(self._beginning() if self._next is None else self._next)
        self._next, self._iteration = None, object()
        return self._pass(self._iteration)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest loop stands, after the item in hand: plain JSON, a few numbers for each source."""
        return self._state() if self._next is None and self._position.cursor.rows else dict(self._next or self._beginning())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop starts there. Raises `ConfigError` for what is no state of such a dataset with the same sources."""
        if not isinstance(state, Mapping) or state.keys() != self._beginning().keys() or list(state["rows"]) != self._names():
            raise ConfigError(
                f"this is no state of a {type(self).__name__} with the sources {self._names()}, in this order: {repr(state)[:200]}"
            )
        self._next = dict(state)

    def _beginning(self) -> dict[str, Any]:
        """The state in which a pass begins."""
        return self._plain(Position(cursor=self._stream().start()), [SourceReport() for _ in self._metas])

    def _state(self) -> dict[str, Any]:
        return self._plain(self._position, self._reports)

    def _plain(self, position: Position, reports: list[SourceReport]) -> dict[str, Any]:
        return {
            "rows": dict(zip(self._names(), position.cursor.rows, strict=True)),
            "turn": position.cursor.turn,
            "items": position.items,
            "report": [report.plain() for report in reports],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._position = Position(cursor=Cursor(rows=tuple(state["rows"].values()), turn=state["turn"]), items=state["items"])
        self._reports = [SourceReport(**report) for report in state["report"]]

    def _pass(self, iteration: object) -> Iterator[Row | InputFeature]:
        for item in self._items(self._position):
            self._check_latest(iteration)
            self._position = item.after
            if item.content is not None:
                yield item.content if isinstance(item.content, dict) else prompt_feature(item.content, item.prompt)
        self._next = self._beginning()

    def _check_latest(self, iteration: object) -> None:
        if iteration is not self._iteration:
            raise ConfigError("another loop over this dataset was started, and state_dict() tells of that one: use a dataset for each loop")

    def _items(self, position: Position) -> Iterator[StreamItem]:
        """The items after `position`. Each row is counted when its first item comes, or when it turns out to have none."""
        before, passed = position.cursor, position.items
        for step, encoded in self._steps(before):
            contents: tuple[Any, ...] = encoded.samples if encoded else () if step.row is None else (step.row,)
            if passed >= max(len(contents), 1):
                raise DataError(f"{step.located.where} gave {passed} samples or more before, and now {len(contents)}: it has changed")
            if not passed:
                self._count(step, encoded)
            prompt = encoded.prompt if encoded else {}
            for number, content in list(enumerate(contents or (None,)))[passed:]:
                is_last = number + 1 >= len(contents)
                after = Position(cursor=step.after) if is_last else Position(cursor=before, items=number + 1)
                origin = (step.located.source, step.number, number)
                yield StreamItem(content=content, prompt=prompt, origin=origin, after=after)
            before, passed = step.after, 0

    def _steps(self, cursor: Cursor) -> Iterator[tuple[Step, EncodedRow | None]]:
        """Each row from there on with what became of it; None where it was not encoded."""
        for block in blocks(self._stream().steps(cursor), LOOK_AHEAD_ROWS):
            rows = [step.located._replace(row=step.row) for step in block if step.row is not None]
            encoded = self._encoder.encode(rows) if self._encoder is not None else iter([None] * len(rows))
            for step in block:
                yield step, None if step.row is None else next(encoded)

    def _count(self, step: Step, encoded: EncodedRow | None) -> None:
        report = self._reports[step.located.source]
        report.rows += 1
        report.filtered += step.row is None
        if encoded is not None:
            encoded.count(report)

    def _stream(self) -> RowStream:
        return RowStream(names=self._names(), sources=self._sources, operations=self._operations, mix=self._mix or "concatenate")

    def _open(self, source: int) -> None:
        self._sources.append(SourceRows(self._metas[source], self._cache_dir))

    def _mixed(self) -> None:
        pass

    def _add(self, operation: Operation) -> None:
        self._operations.append(operation)

    def _rows_to_save(self) -> Iterator[Mapping[str, Any]]:
        return iter(self)
