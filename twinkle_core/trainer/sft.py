"""Supervised fine-tuning: the loop, and what one step reports.

A step waits for no device. What the steps gave is read before a checkpoint, at the end, and otherwise about once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsFloat

from twinkle_core.checkpoint.manifest import Manifest, TrainerState
from twinkle_core.checkpoint.save import Checkpointer
from twinkle_core.config import TrainConfig
from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.trainer.pace import Pace
from twinkle_core.types import PackedRow, Progress, StepOutput

History = list[dict[str, Any]]
"""One row an optimizer step, from the first on; travels in the checkpoint."""


class Trainable(Protocol):
    """What the loop needs of a model; `TransformersModel` has it, local or on a Ray group."""

    def forward_backward(self, inputs: Sequence[PackedRow], *, micro_batch_size: int, seed: tuple[int, ...] | None) -> StepOutput: ...

    def clip_grad_and_step(self, max_grad_norm: float) -> SupportsFloat: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that was taken, of which the loss and the norm may still be on their way."""

    state: TrainerState
    """After it."""
    output: StepOutput
    grad_norm: SupportsFloat
    num_rows: int
    num_tokens: int
    time: float
    """Seconds since 1970."""


def train(
    *,
    model: Trainable,
    loader: DataLoader,
    config: TrainConfig,
    state: TrainerState,
    history: History,
    checkpointer: Checkpointer,
    log: Callable[[dict[str, Any]], None],
    progress: Progress,
) -> Manifest:
    """Runs the optimizer steps that `state` has not completed and returns the committed checkpoint of the last one.

    `loader` stands at `state.consumed_train_samples`; `history` holds the rows of the steps already done and is extended. Raises
    `TrainingError` naming the first step whose loss or gradient was not finite; the steps before it are logged.
    """
    rows_per_epoch = len(loader.dataset)
    progress.start("train", rows_per_epoch * config.epochs, "rows")
    progress.advance(state.consumed_train_samples)
    pace, unread = Pace(), list[Step]()

    def read() -> None:
        if not unread:
            return
        rows = read_rows(unread, pace, log)
        history.extend(rows)
        checkpointer.after_step(state, history)
        for step, row in zip(unread, rows, strict=True):
            progress.advance(step.num_rows, **{name: row[name] for name in SHOWN})
        unread.clear()

    with closing(iter(loader)) as batches:
        for rows in pace.batches(batches):
            output = model.forward_backward(rows, micro_batch_size=config.micro_batch_size, seed=(config.seed, state.cur_step))
            grad_norm = model.clip_grad_and_step(config.max_grad_norm)
            state = advance(state, rows, rows_per_epoch)
            counts = {"num_rows": len(rows), "num_tokens": _num_tokens(rows)}
            unread.append(Step(state=state, output=output, grad_norm=grad_norm, time=time.time(), **counts))
            if pace.is_time or checkpointer.is_due(state):
                read()
    read()
    return checkpointer.finish(state, history)


SHOWN = ("step", "consumed_train_tokens", "loss", "tokens_per_second")
"""What a progress bar is told of a step."""


def read_rows(steps: Sequence[Step], pace: Pace, log: Callable[[dict[str, Any]], None]) -> History:
    """The rows of steps, read and logged. Raises `TrainingError` at the first whose loss or norm is not finite."""
    numbers = []
    try:
        for step in steps:
            numbers.append((step.output.loss, float(step.grad_norm)))
    finally:
        speed = pace.read(sum(step.num_tokens for step in steps))
        rows = [step_row(step, loss, norm, speed) for step, (loss, norm) in zip(steps, numbers, strict=False)]
        for row in rows:
            log(row)
    return rows


def advance(state: TrainerState, rows: Sequence[PackedRow], rows_per_epoch: int) -> TrainerState:
    """The state after an optimizer step over `rows`."""
    consumed = state.consumed_train_samples + len(rows)
    return replace(
        state,
        cur_step=state.cur_step + 1,
        consumed_train_samples=consumed,
        consumed_train_documents=state.consumed_train_documents + sum(len(row.seq_lens) for row in rows),
        consumed_train_tokens=state.consumed_train_tokens + _num_tokens(rows),
        epoch=consumed / rows_per_epoch,
    )


def step_row(step: Step, loss: float, grad_norm: float, speed: dict[str, float]) -> dict[str, Any]:
    """What is known of one step: numbers that a replay gives again to the bit, and the clock's (`CLOCK_FIELDS`)."""
    state = step.state
    return {
        "step": state.cur_step,
        "loss": loss,
        "lr": step.output.lr,
        "grad_norm": grad_norm,
        "num_loss_tokens": step.output.num_loss_tokens,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_train_documents": state.consumed_train_documents,
        "consumed_train_tokens": state.consumed_train_tokens,
        "epoch": state.epoch,
        **speed,
        "time": step.time,
    }


CLOCK_FIELDS = ("tokens_per_second", "loader_wait", "time")
"""Fields of a row that a replay does not repeat."""


def _num_tokens(rows: Sequence[PackedRow]) -> int:
    return sum(len(row.input_ids) for row in rows)
