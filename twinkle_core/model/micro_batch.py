"""Rows that go through the model together, with what a loss needs to know of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinkle_core.errors import ConfigError
from twinkle_core.types import IGNORE, PackedRow

PER_ROW = (
    "advantages",
    "token_advantages",
    "old_log_probs",
    "ref_log_probs",
    "teacher_logits",
    "teacher_top_log_probs",
    "teacher_top_ids",
    "targets",
    "margins",
)
"""Inputs of a loss that are given for each row: a number or an array (see `twinkle_core.loss.base.LossInputs`)."""
ALIASES = {"old_logps": "old_log_probs", "ref_logps": "ref_log_probs"}
"""Twinkle's names."""
SCALARS = ("kl",)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Consecutive rows of a call."""

    position: int
    """Number of the micro-batch within its call."""
    rows: Sequence[Any]
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Of the names of `PER_ROW` a list with an entry for each row; of `SCALARS` a number."""

    @classmethod
    def filler(cls) -> MicroBatch:
        """What a rank runs that has nothing to do while the others work: two tokens, no label."""
        row = PackedRow(
            input_ids=np.zeros(2, dtype=np.int32),
            labels=np.full(2, IGNORE, dtype=np.int32),
            seq_lens=np.array([2], dtype=np.int32),
            sample_ids=np.zeros(1, dtype=np.int64),
        )
        return cls(position=-1, rows=[row])

    @property
    def is_filler(self) -> bool:
        return self.position < 0


def cut_rows(rows: Sequence[Any], size: int, loss_inputs: Mapping[str, Any] | None = None) -> list[MicroBatch]:
    """Micro-batches of `size` consecutive rows. Raises `ConfigError` for inputs of no known name, or not one for each row."""
    if size < 1:
        raise ConfigError(f"micro_batch_size is {size}; at least 1 is needed")
    if not rows:
        raise ConfigError("no rows were given")
    given = check_loss_inputs(loss_inputs or {}, len(rows))
    starts = range(0, len(rows), size)
    return [
        MicroBatch(
            position=position,
            rows=rows[start : start + size],
            loss_inputs={name: value if name in SCALARS else value[start : start + size] for name, value in given.items()},
        )
        for position, start in enumerate(starts)
    ]


def by_data_rank(places: Sequence[tuple[int, int]]) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A dispatch of micro-batches, the first argument: each worker is sent those of its data rank, and no others.

    `places` are (data rank, number of data ranks) of each worker; data rank r has the positions r, r + W, …
    """

    def to_owner(num_workers: int, worker: int, args: Any, kwargs: Any, device_mesh: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        data_rank, data_world_size = places[worker]
        return ([batch for batch in args[0] if batch.position % data_world_size == data_rank], *args[1:]), kwargs

    return to_owner


def check_loss_inputs(loss_inputs: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """By our names, without those that are None."""
    given = {ALIASES.get(name, name): value for name, value in loss_inputs.items() if value is not None}
    for name, value in given.items():
        if name not in (*PER_ROW, *SCALARS):
            raise ConfigError(f"a loss takes no {name!r}; known: {', '.join((*PER_ROW, *SCALARS, *ALIASES))}")
        if name in PER_ROW and len(value) != num_rows:
            raise ConfigError(f"{name} has {len(value)} entries for {num_rows} rows: one for each row is needed")
    return given


def in_order(parts: Sequence[tuple[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The rows of all micro-batches by their position; ranks that share data give the same."""
    by_position = dict(parts)
    return [row for position in sorted(by_position) for row in by_position[position]]
