"""Supervised fine-tuning: the loop, and what one step reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from twinkle_core.checkpoint.manifest import Manifest, TrainerState
from twinkle_core.checkpoint.save import Checkpointer
from twinkle_core.config import TrainConfig
from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.types import PackedRow, Progress, StepOutput

History = list[dict[str, Any]]
"""One row an optimizer step, from the first on; travels in the checkpoint."""


class Trainable(Protocol):
    """What the loop needs of a model; `TransformersModel` has it, local or on a Ray group."""

    def forward_backward(self, inputs: Sequence[PackedRow], *, micro_batch_size: int, seed: tuple[int, ...] | None) -> StepOutput: ...

    def clip_grad_and_step(self, max_grad_norm: float) -> float: ...

    def get_lr(self) -> float: ...


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

    `loader` stands at `state.consumed_train_samples`; `history` holds the rows of the steps already done and is extended.
    """
    rows_per_epoch = len(loader.dataset)
    progress.start("train", rows_per_epoch * config.epochs, "rows")
    progress.advance(state.consumed_train_samples)
    for rows in loader:
        began = time.perf_counter()
        lr = model.get_lr()
        output = model.forward_backward(rows, micro_batch_size=config.micro_batch_size, seed=(config.seed, state.cur_step))
        grad_norm = model.clip_grad_and_step(config.max_grad_norm)
        seconds = time.perf_counter() - began
        state = advance(state, rows, rows_per_epoch)
        row = step_row(state, output, lr=lr, grad_norm=grad_norm, num_tokens=_num_tokens(rows), seconds=seconds)
        history.append(row)
        log(row)
        checkpointer.after_step(state, history)
        shown = ("step", "consumed_train_tokens", "loss", "tokens_per_second")
        progress.advance(len(rows), **{name: row[name] for name in shown})
    return checkpointer.finish(state, history)


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


def step_row(state: TrainerState, output: StepOutput, *, lr: float, grad_norm: float, num_tokens: int, seconds: float) -> dict[str, Any]:
    """What is known of one step: numbers that a replay gives again to the bit, and the clock's (`time`, `tokens_per_second`)."""
    return {
        "step": state.cur_step,
        "loss": output.loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "num_loss_tokens": output.num_loss_tokens,
        "consumed_train_samples": state.consumed_train_samples,
        "consumed_train_documents": state.consumed_train_documents,
        "consumed_train_tokens": state.consumed_train_tokens,
        "epoch": state.epoch,
        "tokens_per_second": num_tokens / seconds,
        "time": time.time(),
    }


CLOCK_FIELDS = ("tokens_per_second", "time")
"""Fields of a row that a replay does not repeat."""


def _num_tokens(rows: Sequence[PackedRow]) -> int:
    return sum(len(row.input_ids) for row in rows)
