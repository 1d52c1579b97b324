"""One supervised fine-tune from start or from its last checkpoint to its last step, rebuilding a lost worker group on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from storage.store import Store
from twinkle_core.checkpoint.manifest import Attempt, Manifest, TrainerState
from twinkle_core.checkpoint.restore import newest_valid
from twinkle_core.checkpoint.retain import keep_policy
from twinkle_core.checkpoint.save import Checkpointer, read_history
from twinkle_core.config import CheckpointConfig, ResourcesConfig, TrainConfig
from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.errors import ConfigError, WorkerLostError
from twinkle_core.infra.group import WorkerGroup, open_group
from twinkle_core.model.transformers import TRANSFORMERS_WORKER, TransformersModel
from twinkle_core.sharding.reader import PackedDataset
from twinkle_core.trainer import sft
from twinkle_core.types import DocumentKind, Progress

ADAPTER = "default"

LEARNT_BY = {
    DocumentKind.CHOSEN: "dpo",
    DocumentKind.REJECTED: "dpo",
    DocumentKind.DESIRABLE: "kto",
    DocumentKind.UNDESIRABLE: "kto",
    DocumentKind.PROMPT: "grpo",
    DocumentKind.ANCHOR: "embedding training",
    DocumentKind.POSITIVE: "embedding training",
    DocumentKind.NEGATIVE: "embedding training",
}
"""Which loop learns from documents of each kind that supervised fine-tuning does not."""


class Tracker(Protocol):
    """Where metric rows go while training runs. Neither method may raise or block."""

    def resume(self, history: sft.History, *, is_current: Callable[[], bool]) -> None: ...

    def log(self, row: dict[str, object]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SFTJob:
    """All that a fine-tune needs, resolved."""

    train_key: str
    model_folder: Path
    shards: PackedDataset
    train: TrainConfig
    checkpoint: CheckpointConfig
    resources: ResourcesConfig


def run_sft(job: SFTJob, *, store: Store, tracker: Tracker, progress: Progress, say: Callable[[str], None]) -> Manifest:
    """The committed checkpoint of the last step.

    Raises `ConfigError` before anything starts for shards that another loop learns from, or that the cache cannot hold.
    A lost worker, node or actor out of memory (`WorkerLostError`) rebuilds the whole group and goes on from HEAD, at most
    `resources.max_restarts` times in a row without a new checkpoint. Any other error ends the run.
    """
    check_shards(job.shards, job.train)
    lost = 0
    newest_step = -1
    for _ in itertools.count():
        attempt = Attempt.begin(store, job.train_key)
        step = attempt.head.checkpoints[0].step if attempt.head.checkpoints else 0
        lost = lost if step == newest_step else 0
        newest_step = step
        try:
            return _run_attempt(job, attempt, tracker, progress, say)
        except WorkerLostError as error:
            lost += 1
            if lost > job.resources.max_restarts:
                raise
            say(f"{error} Rebuilding the worker group ({lost} of {job.resources.max_restarts}).")
    raise AssertionError("unreachable")


def _run_attempt(job: SFTJob, attempt: Attempt, tracker: Tracker, progress: Progress, say: Callable[[str], None]) -> Manifest:
    loader = DataLoader(
        job.shards,
        batch_size=job.train.batch_size,
        shuffle=job.train.shuffle,
        shuffle_shards=job.train.shuffle_shards,
        seed=job.train.seed,
        num_epochs=job.train.epochs,
        num_workers=1,
    )
    group = open_group(TRANSFORMERS_WORKER, job.resources)
    try:
        model = build_model(job, group, num_training_steps=len(loader))
        found = newest_valid(attempt.store, attempt.head)
        for problem in found.problems:
            say(problem)
        state, history = fresh_state(job), []
        if found.manifest is not None:
            model.restore_from(attempt.store.url, found.manifest.prefix, found.manifest.files)
            state = replace(
                found.manifest.state, world_size=state.world_size, gradient_accumulation_steps=state.gradient_accumulation_steps
            )
            history = read_history(attempt.store.get(f"{found.manifest.prefix}/history.jsonl"))
            loader.resume_from_checkpoint(state.consumed_train_samples)
            rest = f"{loader.remaining} steps remain" if loader.remaining else "no step remains"
            say(f"resuming after step {state.cur_step} ({state.consumed_train_samples} rows consumed): {rest}")
        tracker.resume(history, is_current=attempt.is_current)
        keep = keep_policy(keep_last=job.checkpoint.keep_last, keep_every=job.checkpoint.keep_every)
        checkpointer = Checkpointer(attempt, model, save_every=job.checkpoint.save_every, keep=keep)
        return sft.train(
            model=model,
            loader=loader,
            config=job.train,
            state=state,
            history=history,
            checkpointer=checkpointer,
            log=tracker.log,
            progress=progress,
        )
    finally:
        group.shutdown()


def check_shards(shards: PackedDataset, train: TrainConfig) -> None:
    """Refuses documents that are not for supervised learning, and a shuffle that a remote store's cache is too small for."""
    if other := sorted(shards.kinds - {DocumentKind.PLAIN}):
        loops = " and ".join(dict.fromkeys(LEARNT_BY[kind] for kind in other))
        raise ConfigError(
            f"the shards hold {', '.join(kind.name for kind in other)} documents, from which {loops} learns; "
            f"supervised fine-tuning takes conversations and plain text only"
        )
    if train.shuffle:
        shards.check_cache(train.shuffle_shards)


def build_model(job: SFTJob, group: WorkerGroup, *, num_training_steps: int) -> TransformersModel:
    """The base model with adapter, optimizer and schedule, before its first step."""
    train = job.train
    model = TransformersModel(
        str(job.model_folder),
        group=group,
        mixed_precision=train.mixed_precision,
        activation_checkpointing=train.activation_checkpointing,
        deterministic=train.deterministic,
        seed=train.seed,
    )
    if train.lora is not None:
        model.add_adapter_to_model(ADAPTER, train.lora)
    model.set_optimizer("AdamW", lr=train.lr, weight_decay=train.weight_decay)
    schedule = {"cosine": "CosineWarmupScheduler", "linear": "LinearWarmupScheduler", "constant": "ConstantWarmupScheduler"}[train.schedule]
    num_warmup_steps = round(train.warmup_ratio * num_training_steps)
    model.set_lr_scheduler(schedule, num_training_steps=num_training_steps, num_warmup_steps=num_warmup_steps)
    return model


def fresh_state(job: SFTJob) -> TrainerState:
    """The state before the first step."""
    micro_batches = job.train.batch_size // job.train.micro_batch_size
    return TrainerState(
        gradient_accumulation_steps=-(-micro_batches // job.resources.workers),
        world_size=job.resources.workers,
        recipe_fingerprint=job.train_key,
    )
