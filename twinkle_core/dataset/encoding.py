"""Rows -> samples through a template, each error told with the place of its row."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from twinkle_core.dataset.input_feature import InputFeature, input_feature
from twinkle_core.dataset.operations import Row, to_trajectory
from twinkle_core.dataset.report import SourceReport
from twinkle_core.errors import DataError
from twinkle_core.template.multimodal import MultimodalSample
from twinkle_core.types import EncodedSample, Trajectory, kind_of

if TYPE_CHECKING:
    from twinkle_core.dataset.images import ImageEncoder
    from twinkle_core.template import Encoder, Outcome

Item = TypeVar("Item")

BLOCK_ROWS = 256
"""Rows that are tokenized together where all are there."""
_FIRST = "conversation 1: "
"""How a template's error about the only conversation starts."""


class LocatedRow(NamedTuple):
    """A row, and where it comes from."""

    source: int
    """Number of its source in the dataset."""
    where: str
    """For messages, e.g. 'chats.jsonl, line 4'."""
    row: Row


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRow:
    """What became of one row."""

    source: int
    where: str
    outcome: Outcome | None
    """None where the row was refused."""
    refused: str = ""
    """Why."""
    prompt: dict[str, Any] = field(default_factory=dict)
    """What a feature of a prompt has beside its tokens: the conversation, and what is known of the answer."""

    @property
    def samples(self) -> tuple[EncodedSample | MultimodalSample, ...]:
        """None, one, or more where truncation cuts the row."""
        return self.outcome.samples if self.outcome else ()

    def count(self, report: SourceReport) -> None:
        """Adds the row to the report of its source."""
        if self.outcome is None:
            report.refuse(self.where, self.refused)
        else:
            report.count(self.outcome)


def prompt_feature(sample: EncodedSample | MultimodalSample, prompt: dict[str, Any]) -> InputFeature:
    """The sample with what else is known of its prompt ({} for other rows)."""
    return {**input_feature(sample), **prompt}  # type: ignore[typeddict-item]


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Encodes rows of any known layout."""

    encoder: Encoder | ImageEncoder
    prompts: bool
    """Rows are prompts, which end where the answer starts; otherwise they have an answer to learn."""
    skip: bool
    """A bad row comes back as refused, and is not raised."""

    def encode(self, rows: Sequence[LocatedRow]) -> Iterator[EncodedRow]:
        """What became of each, in order. Those before a bad one are given before its `DataError` is raised."""
        prepared = self._prepare(rows)
        good = [item for item in prepared if not isinstance(item, str)]
        return self._results(rows, prepared, outcomes_or_reason(self.encoder, good))

    def encode_blocks(self, rows: Iterable[LocatedRow], num_proc: int) -> Iterator[EncodedRow]:
        """`encode` of many rows, in blocks, by that many processes."""
        if num_proc == 1:
            for block in blocks(rows, BLOCK_ROWS):
                yield from self.encode(block)
            return
        from twinkle_core.template.processes import ProcessMap

        sent: deque[tuple[Sequence[LocatedRow], list[Trajectory | str]]] = deque()

        def lines() -> Iterator[bytes]:
            for block in blocks(rows, BLOCK_ROWS):
                sent.append((block, self._prepare(block)))
                yield _as_lines(*sent[-1])

        with ProcessMap(EncodeLines(self.encoder), num_proc) as mapped:
            for outcomes in mapped(lines()):
                yield from self._results(*sent.popleft(), outcomes)

    def _prepare(self, rows: Sequence[LocatedRow]) -> list[Trajectory | str]:
        """The rows' trajectories, or why a row has none; ends at the first of these when it is to be raised."""
        prepared: list[Trajectory | str] = []
        for row in rows:
            try:
                prepared.append(self._trajectory(row.row))
            except DataError as error:
                prepared.append(str(error))
                if not self.skip:
                    break
        return prepared

    def _trajectory(self, row: Row) -> Trajectory:
        trajectory = to_trajectory(row)
        if not self.prompts:
            if kind_of(trajectory) == "prompt":
                raise DataError(
                    "the conversation has no answer of the assistant, so there is nothing to learn; "
                    "encode(add_generation_prompt=True) makes a prompt of it"
                )
            return trajectory
        if not trajectory["messages"] or trajectory["messages"][-1]["role"] == "assistant":
            raise DataError("with add_generation_prompt a row ends before the assistant's answer, and this one does not")
        return {**trajectory, "prompt_only": True}

    def _results(self, rows: Sequence[LocatedRow], prepared: list[Trajectory | str], outcomes: list[Outcome | str]) -> Iterator[EncodedRow]:
        known = iter(outcomes)
        for row, item in zip(rows, prepared, strict=False):
            result = item if isinstance(item, str) else next(known)
            if isinstance(result, str):
                if not self.skip:
                    raise DataError(f"{row.where}: {result}")
                yield EncodedRow(source=row.source, where=row.where, outcome=None, refused=result)
            elif result.refused is not None:
                yield EncodedRow(source=row.source, where=row.where, outcome=None, refused=result.refused)
            else:
                yield EncodedRow(source=row.source, where=row.where, outcome=result, prompt=_kept(item) if self.prompts else {})


@dataclass(frozen=True)
class EncodeLines:
    """Encodes trajectories written as lines of JSON. Picklable: what an encoding process is given."""

    encoder: Encoder | ImageEncoder

    def __call__(self, lines: bytes) -> list[Outcome | str]:
        return outcomes_or_reason(self.encoder, [json.loads(line) for line in lines.splitlines()])


def outcomes_or_reason(encoder: Encoder | ImageEncoder, trajectories: Sequence[Trajectory]) -> list[Outcome | str]:
    """The outcome of each, or the reason why there is none."""
    try:
        return list(encoder.outcomes(trajectories))
    except DataError as error:
        if len(trajectories) == 1:
            return [str(error).removeprefix(_FIRST)]
        return [result for trajectory in trajectories for result in outcomes_or_reason(encoder, [trajectory])]


def blocks(rows: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The rows in lists of `size`, the last one shorter. Rows before an error are given before it is raised."""
    block: list[Item] = []
    try:
        for row in rows:
            block.append(row)
            if len(block) == size:
                yield block
                block = []
    except Exception:
        if block:
            yield block
        raise
    if block:
        yield block


def _as_lines(rows: Sequence[LocatedRow], prepared: Sequence[Trajectory | str]) -> bytes:
    lines = []
    for row, item in zip(rows, prepared, strict=False):
        if isinstance(item, str):
            continue
        try:
            lines.append(json.dumps(item, allow_nan=False))  # ASCII only, so that bytes split at LF and nowhere else
        except (TypeError, ValueError) as error:
            raise DataError(f"{row.where}: encoding by several processes takes rows that JSON can hold: {error}") from error
    return "\n".join(lines).encode("ascii")


def _kept(trajectory: Any) -> dict[str, Any]:
    return {key: trajectory[key] for key in ("messages", "tools", "user_data") if key in trajectory}
