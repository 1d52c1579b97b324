"""What an encoding process does: lines of JSON in, columns of numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources import parse_json
from twinkle_core.template.outcome import Outcome
from twinkle_core.types import IGNORE, EncodedSample, Trajectory, user_data_get

MAX_LISTED = 20
"""Refused rows that are listed in the report; all are counted."""


class Encodes(Protocol):
    """A template's encoder."""

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[Outcome]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that ends the stage."""

    row: int
    """Which of the batch, from 0."""
    reason: str
    source: str | None
    """Name of the source it came from; None where the line cannot be read at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """S samples of T tokens and D documents in all, one after the other, and what became of the rows."""

    input_ids: np.ndarray
    """[T] int32."""
    labels: np.ndarray
    """[T] int32."""
    loss_weights: np.ndarray
    """float32, of those samples that have weights."""
    weighted: np.ndarray
    """[S] bool: which have."""
    num_tokens: np.ndarray
    """[S] int64."""
    seq_lens: np.ndarray
    """[D] int32."""
    kinds: np.ndarray
    """[D] int8."""
    num_documents: np.ndarray
    """[S] int64."""
    rows: np.ndarray
    """[S] int64 row of each sample, from 0 at the first of the batch."""
    counts: dict[str, Any]
    """As in the report of a side."""


def new_counts() -> dict[str, Any]:
    """The report of no rows. conversations = encoded + dropped + refused, each row in one of them."""
    return {
        "conversations": 0, "encoded": 0, "samples": 0, "documents": 0, "tokens": 0, "supervised_tokens": 0, "longest": 0,
        "truncated": 0, "truncated_tokens": 0, "split": 0, "dropped": {"too_long": 0, "no_loss": 0}, "dropped_tokens": 0,
        "refused": 0, "refused_rows": [], "unprinted_tools": 0,
    }  # fmt: skip


def add_counts(total: dict[str, Any], part: dict[str, Any], first_line: int) -> None:
    """Adds a part's report whose refused rows are numbered from `first_line`."""
    for name, value in part.items():
        if name == "refused_rows":
            listed = [{**row, "line": row["line"] + first_line} for row in value]
            total[name] += listed[: MAX_LISTED - len(total[name])]
        elif name == "dropped":
            for reason, number in value.items():
                total[name][reason] += number
        else:
            total[name] = max(total[name], value) if name == "longest" else total[name] + value


@dataclass(frozen=True, kw_only=True)
class EncodeLines:
    """Lines of JSON, one trajectory each -> their samples, or the first row that ends the stage. Picklable."""

    encoder: Encodes

    def __call__(self, lines: bytes) -> SampleColumns | BadRow:
        trajectories: list[Trajectory] = []
        for row, line in enumerate(lines.removesuffix(b"\n").split(b"\n")):
            try:
                trajectories.append(parse_json(line))
            except DataError as error:
                unread = BadRow(row=row, reason=str(error), source=None)
                # An earlier row may be the first that is wrong.
                found = self._encode(trajectories) if trajectories else unread
                return found if isinstance(found, BadRow) else unread
        return self._encode(trajectories)

    def _encode(self, trajectories: list[Trajectory]) -> SampleColumns | BadRow:
        try:
            outcomes = self.encoder.outcomes(trajectories)
        except DataError as error:
            place, reason = str(error).split(": ", 1)
            row = int(place.removeprefix("conversation ")) - 1
            return BadRow(row=row, reason=reason, source=user_data_get(trajectories[row], "source", "unnamed"))
        return sample_columns(outcomes)


def sample_columns(outcomes: Sequence[Outcome]) -> SampleColumns:
    """The samples of all outcomes as columns, with their counts."""
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    rows = [row for row, outcome in enumerate(outcomes) for _ in outcome.samples]
    labels = _joined(samples, "labels", np.int32)
    seq_lens = _joined(samples, "seq_lens", np.int32)
    weights = [sample.loss_weights for sample in samples]
    num_tokens = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    counts = _count_rows(outcomes) | {
        "samples": len(samples),
        "documents": len(seq_lens),
        "tokens": int(num_tokens.sum()),
        "supervised_tokens": int((labels != IGNORE).sum()),
        "longest": int(num_tokens.max(initial=0)),
    }
    return SampleColumns(
        input_ids=_joined(samples, "input_ids", np.int32),
        labels=labels,
        loss_weights=np.concatenate([np.empty(0, np.float32), *(part for part in weights if part is not None)]),
        weighted=np.array([part is not None for part in weights], dtype=bool),
        num_tokens=num_tokens,
        seq_lens=seq_lens,
        kinds=_joined(samples, "kinds", np.int8),
        num_documents=np.array([len(sample.seq_lens) for sample in samples], dtype=np.int64),
        rows=np.array(rows, dtype=np.int64),
        counts=counts,
    )


def _joined(samples: list[EncodedSample], name: str, dtype: Any) -> np.ndarray:
    arrays = [getattr(sample, name) for sample in samples]
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)


def _count_rows(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    counts = new_counts()
    for row, outcome in enumerate(outcomes):
        counts["conversations"] += 1
        counts["unprinted_tools"] += outcome.unprinted_tools
        if outcome.refused is not None:
            counts["refused"] += 1
            if len(counts["refused_rows"]) < MAX_LISTED:
                counts["refused_rows"].append({"line": row + 1, "reason": outcome.refused})
        elif outcome.dropped is not None:
            counts["dropped"][outcome.dropped] += 1
            counts["dropped_tokens"] += outcome.num_tokens
        else:
            counts["encoded"] += 1
            counts["truncated"] += outcome.truncated_tokens > 0
            counts["truncated_tokens"] += outcome.truncated_tokens
            counts["split"] += len(outcome.samples) > 1
    return counts
