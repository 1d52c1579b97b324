"""The data that travels between stages. Importing this module imports numpy and nothing heavier.

A label at position t is the token that position t must predict: labels are shifted once, here, by the template,
and never again. Positions that carry no loss hold `IGNORE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np

IGNORE = -100
"""Label of a position that predicts nothing (torch's default `ignore_index`)."""


class Message(TypedDict):
    """One turn of a conversation, in OpenAI's form."""

    role: str
    content: Any
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class Trajectory(TypedDict):
    """A conversation, with what is needed to learn from it or to score an answer to it.

    Example: `{'messages': [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}],
    'user_data': [('source', 'sums'), ('scorer', 'last_number'), ('answer', '4')]}`
    """

    messages: list[Message]
    tools: NotRequired[list[dict[str, Any]]]
    user_data: NotRequired[list[tuple[str, str]]]


def user_data_get(trajectory: Trajectory, key: str, default: str | None = None) -> str | None:
    """The first value stored under `key` in the trajectory's `user_data`, else `default`."""
    return next((value for name, value in trajectory.get("user_data", []) if name == key), default)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """One document as token ids.

    Example: the ids `[u1, u2, a1, a2, eos]`, of which the last three are learnt, have the labels
    `[IGNORE, a1, a2, eos, IGNORE]`; `num_loss_tokens` is 3.
    """

    input_ids: np.ndarray
    """[T] int32 token ids."""
    labels: np.ndarray
    """[T] int32, already shifted; the last is always `IGNORE`."""

    def __post_init__(self) -> None:
        _check_same_length(self.input_ids, self.labels)

    @property
    def seq_lens(self) -> np.ndarray:
        """[1] int32: a sample is a row of one document."""
        return np.array([len(self.input_ids)], dtype=np.int32)

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Several documents in one row, kept apart by `seq_lens`: no token attends to or predicts another document.

    Example: two documents of 3 and 2 tokens have `seq_lens == [3, 2]`, 5 input ids, and `labels[2] == labels[4] == IGNORE`.
    """

    input_ids: np.ndarray
    """[T] int32, documents one after the other."""
    labels: np.ndarray
    """[T] int32, already shifted within each document."""
    seq_lens: np.ndarray
    """[D] int32 lengths of the documents, sum T."""
    sample_ids: np.ndarray
    """[D] int64 position of each document in the encode stage's output: the proof that none is lost or doubled."""

    def __post_init__(self) -> None:
        _check_same_length(self.input_ids, self.labels)
        if int(self.seq_lens.sum()) != len(self.input_ids):
            raise ValueError(f"seq_lens sum to {int(self.seq_lens.sum())}, but the row has {len(self.input_ids)} tokens")

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one optimizer step's forward passes gave, summed over micro-batches and workers."""

    loss_sum: float
    """Sum of the token losses, in nats."""
    num_loss_tokens: int
    """Number of supervised tokens that the sum runs over, in the whole global batch."""

    @property
    def loss(self) -> float:
        """Mean loss per supervised token of the global batch, in nats."""
        return self.loss_sum / self.num_loss_tokens


class Progress(Protocol):
    """Where a long computation reports how far it is. `advance` may be called often and must be cheap."""

    def start(self, description: str, total: int | None, unit: str) -> None: ...

    def advance(self, amount: int = 1, **facts: float | str) -> None: ...


class NoProgress:
    """A `Progress` that reports nowhere."""

    def start(self, description: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        pass


def _check_same_length(input_ids: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
    if len(input_ids) != len(labels):
        raise ValueError(f"{len(input_ids)} input ids but {len(labels)} labels")
