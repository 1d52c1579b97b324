"""Encoded samples and a packing plan → Arrow shards with an index."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef
from tasks.artifacts import folder_of
from tasks.console import stage_bar
from tasks.context import Context
from tasks.parts import StoredParts
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import ShardConfig
from twinkle_core.sharding.writer import VERSION, write_shards

STAGE = Stage(name="shard", version=VERSION, modules=("twinkle_core.sharding.samples", "twinkle_core.sharding.writer"))


def wanted_shards(shard: ShardConfig, encoded: ArtifactRef, plan: ArtifactRef) -> Wanted:
    """Rows are the encoded samples, arranged by the plan."""
    return Wanted(stage=STAGE, recipe=shard.recipe_dump(), inputs={"encoded": encoded, "plan": plan})


@task(name="shard", **TASK_OPTIONS)
def shard_task(context: Context, shard: ShardConfig, encoded: ArtifactRef, plan: ArtifactRef) -> State[ArtifactRef]:
    """The packed rows, in shards."""
    with stage_bar(STAGE.name) as progress:

        def compute(key: str, work: Path) -> Produced:
            with StoredParts(context.store, STAGE.name, key) as parts:
                index = write_shards(folder_of(context, encoded), folder_of(context, plan), shard, work, progress, parts=parts)
                stored = parts.stored(work)
            return Produced(summary={"headline": f"{index['num_rows']} rows in {len(index['shards'])} shards"} | index, stored=stored)

        return ended(run_step(context, wanted_shards(shard, encoded, plan), compute=compute, say=say_in_run()))
