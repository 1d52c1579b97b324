"""Shards and base model → the checkpoint of the last step, by the supervised loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef
from tasks.artifacts import record_of
from tasks.base_model import resolve, weights_ref
from tasks.console import stage_bar
from tasks.context import Context
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, StepResult, Wanted, run_step
from tasks.track import LiveProgress, tracked
from twinkle_core.config import CheckpointConfig, ModelConfig, ResourcesConfig, TrainConfig
from twinkle_core.hub.resolve import ModelSource
from twinkle_core.types import Progress

if TYPE_CHECKING:
    from twinkle_core.sharding.reader import PackedDataset

STAGE = Stage(
    name="train",
    version=4,
    modules=(
        "twinkle_core.dataloader",
        "twinkle_core.infra.dispatch",
        "twinkle_core.kernel",
        "twinkle_core.loss",
        "twinkle_core.model",
        "twinkle_core.processor",
        "twinkle_core.scheduler",
        "twinkle_core.sharding.cache",
        "twinkle_core.sharding.columns",
        "twinkle_core.sharding.reader",
        "twinkle_core.sharding.stored",
        "twinkle_core.trainer",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The parts of a run's settings that training reads; only `train` enters the key."""

    model: ModelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    resources: ResourcesConfig


def wanted_checkpoint(base: ModelSource, train: TrainConfig, shards: ArtifactRef) -> Wanted:
    """Workers, threads and how often it is saved are no part of it."""
    return Wanted(stage=STAGE, recipe=train.recipe_dump(), inputs={"shards": shards, "base_model": weights_ref(base)})


def train(context: Context, settings: TrainSettings, shards: ArtifactRef, *, progress: Progress, say: Callable[[str], None]) -> StepResult:
    """The stage without Prefect: resumes from the newest valid checkpoint of this recipe and these inputs."""
    base = resolve(context, settings.model)

    def compute(key: str, _work: Path) -> Produced:
        from twinkle_core.trainer.run import SFTJob, run_sft

        job = SFTJob(
            train_key=key,
            model_folder=base.materialise(),
            shards=open_shards(context, shards, settings.resources),
            train=settings.train,
            checkpoint=settings.checkpoint,
            resources=settings.resources,
        )
        with tracked(context, key, settings.train, say) as tracker:
            last = run_sft(job, store=context.store, tracker=tracker, progress=progress, say=say)
        headline = f"{last.step} steps, {last.state.consumed_train_samples} rows, {last.state.consumed_train_tokens} tokens"
        return Produced(stored=(last.prefix.rsplit("/", 1)[-1], last.files), summary={"headline": headline})

    return run_step(context, wanted_checkpoint(base, settings.train, shards), compute=compute, say=say)


def open_shards(context: Context, ref: ArtifactRef, resources: ResourcesConfig) -> PackedDataset:
    """The packed rows: in place where the store is local, else through this host's cache of shards."""
    from twinkle_core.sharding.cache import ShardCache
    from twinkle_core.sharding.reader import PackedDataset

    record = record_of(context, ref)
    cache = ShardCache(context.cache / "shards", resources.shard_cache_bytes)
    return PackedDataset.open(context.store, record.prefix, record.files, cache)


@task(name="train", **TASK_OPTIONS)
def train_task(context: Context, settings: TrainSettings, shards: ArtifactRef) -> State[ArtifactRef]:
    """The trained weights with optimizer state and metric history."""
    with stage_bar(STAGE.name) as bar, LiveProgress(bar, "consumed_train_samples / total") as progress:
        return ended(train(context, settings, shards, progress=progress, say=say_in_run()))
