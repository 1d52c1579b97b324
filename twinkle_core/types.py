"""The data that travels between stages. Importing this module imports numpy and nothing heavier.

A label at position t is the token that position t must predict: labels are shifted once, here, by the template,
and never again. Positions that carry no loss hold `IGNORE`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np

from twinkle_core.lazy_number import LazyNumber

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
    loss_weight: NotRequired[float]
    """Weight of this turn's tokens in the loss, 0 for none; without it the template's rule stands (`TemplateConfig.learn`)."""


class EmbeddingPair(TypedDict):
    """Texts whose embeddings are to be near or far."""

    anchor: str
    positive: str
    negatives: NotRequired[list[str]]


class Trajectory(TypedDict):
    """What is learnt from one row, with what is needed to score an answer to it. `kind_of` tells which of the kinds it is.

    Example: `{'messages': [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}],
    'user_data': [('source', 'sums'), ('scorer', 'last_number'), ('answer', '4')]}`
    """

    messages: list[Message]
    """The conversation; of a preference pair the chosen one; of a prompt what comes before the answer; [] beside `text` and `embedding`."""
    tools: NotRequired[list[dict[str, Any]]]
    user_data: NotRequired[list[tuple[str, str]]]
    rejected_messages: NotRequired[list[Message]]
    """Preference pair: the whole rejected conversation, prompt included."""
    desirable: NotRequired[bool]
    """Judged conversation (KTO, https://arxiv.org/abs/2402.01306): whether the answer is a good one."""
    prompt_only: NotRequired[bool]
    """An answer to the last turn is to be sampled, though the assistant speaks in earlier ones."""
    text: NotRequired[str]
    """Plain text for continued pre-training."""
    embedding: NotRequired[EmbeddingPair]
    images: NotRequired[list[Any]]
    """References (path, URL or data URI), one for each image placeholder or part of the messages, in order."""
    videos: NotRequired[list[Any]]
    audios: NotRequired[list[Any]]


Kind = Literal["conversation", "text", "preference", "judged", "prompt", "embedding"]


def kind_of(trajectory: Trajectory) -> Kind:
    """What a trajectory is for. A conversation in which the assistant never speaks is a prompt: an answer is to be sampled."""
    if "text" in trajectory:
        return "text"
    if "embedding" in trajectory:
        return "embedding"
    if "rejected_messages" in trajectory:
        return "preference"
    if "desirable" in trajectory:
        return "judged"
    if trajectory.get("prompt_only") or all(message["role"] != "assistant" for message in trajectory["messages"]):
        return "prompt"
    return "conversation"


def user_data_get(trajectory: Trajectory, key: str, default: str | None = None) -> str | None:
    """The first value stored under `key` in the trajectory's `user_data`, else `default`."""
    return next((value for name, value in trajectory.get("user_data", []) if name == key), default)


class DocumentKind(IntEnum):
    """What a document of a row is for; stored as int8."""

    PLAIN = 0
    CHOSEN = 1
    REJECTED = 2
    DESIRABLE = 3
    UNDESIRABLE = 4
    PROMPT = 5
    ANCHOR = 6
    POSITIVE = 7
    NEGATIVE = 8


_UNSET = np.empty(0, dtype=np.int32)


def _unset() -> np.ndarray:
    return _UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """One sample as token ids: one document, or several that belong together (the two of a preference pair).

    Example: the ids `[u1, u2, a1, a2, eos]`, of which the last three are learnt, have the labels
    `[IGNORE, a1, a2, eos, IGNORE]`; `num_loss_tokens` is 3.
    """

    input_ids: np.ndarray
    """[T] int32 token ids."""
    labels: np.ndarray
    """[T] int32, already shifted; the last of each document is always `IGNORE`."""
    seq_lens: np.ndarray = field(default_factory=_unset)
    """[D] int32 lengths of the documents, sum T; one document when not given."""
    kinds: np.ndarray = field(default_factory=_unset)
    """[D] int8 `DocumentKind`s; all PLAIN when not given."""
    loss_weights: np.ndarray | None = None
    """[T] float32 weight of each label's loss; None weighs all 1."""

    def __post_init__(self) -> None:
        if self.seq_lens is _UNSET:
            object.__setattr__(self, "seq_lens", np.array([len(self.input_ids)], dtype=np.int32))
        if self.kinds is _UNSET:
            object.__setattr__(self, "kinds", np.zeros(len(self.seq_lens), dtype=np.int8))
        _check_row(self)

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())

    @property
    def loss_weight(self) -> float:
        """Sum of the weights of the supervised tokens; their number without weights."""
        return loss_weight(self)


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
    """[D] int64 position of each document's sample in the encode stage's output: the proof that none is lost or doubled."""
    kinds: np.ndarray = field(default_factory=_unset)
    """[D] int8 `DocumentKind`s; all PLAIN when not given."""
    loss_weights: np.ndarray | None = None
    """[T] float32 weight of each label's loss; None weighs all 1."""

    def __post_init__(self) -> None:
        if self.kinds is _UNSET:
            object.__setattr__(self, "kinds", np.zeros(len(self.seq_lens), dtype=np.int8))
        _check_row(self)

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())

    @property
    def loss_weight(self) -> float:
        """Sum of the weights of the supervised tokens; their number without weights."""
        return loss_weight(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one optimizer step's forward passes gave, summed over micro-batches and workers.

    Of a `TransformersModel` the losses are on the device until `loss` or `loss_sum` is looked at, which waits for them.
    """

    loss_sum: float | LazyNumber
    """Sum of the token losses, in nats, each times its weight."""
    num_loss_tokens: int
    """Number of supervised tokens that the sum runs over, in the whole global batch."""
    loss_weight: float
    """Sum of their weights; `num_loss_tokens` where no row has weights."""
    lr: float | None = None
    """Learning rate of the optimizer step that they are for, where it is known."""

    @property
    def loss(self) -> float:
        """Weighted mean loss per supervised token of the global batch, in nats."""
        return float(self.loss_sum) / self.loss_weight


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


class PartSink(Protocol):
    """Takes the finished files of a long computation one by one, so that a killed one goes on after the last of them."""

    def finished(self, name: str) -> dict[str, Any] | None:
        """The facts given with a file that was added before, in this attempt or a killed one, and is still whole; else None."""
        ...

    def add(self, path: Path, facts: dict[str, Any]) -> None:
        """Takes a finished file over (its name is `path.name`); `facts` is plain JSON. The file may be gone afterwards."""
        ...


class KeepParts:
    """A `PartSink` for a computation that writes where its files are to stay: nothing is resumed."""

    def finished(self, name: str) -> dict[str, Any] | None:
        return None

    def add(self, path: Path, facts: dict[str, Any]) -> None:
        pass


def loss_weight(row: EncodedSample | PackedRow) -> float:
    """Sum of the weights of the row's supervised tokens; their number where it has no weights."""
    if row.loss_weights is None:
        return float(row.num_loss_tokens)
    return float(row.loss_weights[row.labels != IGNORE].sum(dtype=np.float64))


def _check_row(row: EncodedSample | PackedRow) -> None:
    tokens, weights = len(row.input_ids), row.loss_weights
    if len(row.labels) != tokens or (weights is not None and len(weights) != tokens):
        raise ValueError(
            f"{tokens} input ids but {len(row.labels)} labels" + ("" if weights is None else f" and {len(weights)} loss weights")
        )
    if int(row.seq_lens.sum()) != tokens or len(row.kinds) != len(row.seq_lens):
        raise ValueError(
            f"seq_lens sum to {int(row.seq_lens.sum())} for {tokens} tokens; {len(row.seq_lens)} documents have {len(row.kinds)} kinds"
        )
