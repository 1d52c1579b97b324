"""Lengths of documents → which documents share a row."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef
from tasks.artifacts import folder_of
from tasks.console import stage_bar
from tasks.context import Context
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import PackingConfig
from twinkle_core.packing.run import VERSION, plan

STAGE = Stage(name="pack", version=VERSION, modules=("twinkle_core.packing",))


def wanted_plan(packing: PackingConfig, encoded: ArtifactRef) -> Wanted:
    """The plan depends on the lengths of the encoded samples."""
    return Wanted(stage=STAGE, recipe=packing.recipe_dump(), inputs={"encoded": encoded})


@task(name="pack", **TASK_OPTIONS)
def pack_task(context: Context, packing: PackingConfig, encoded: ArtifactRef) -> State[ArtifactRef]:
    """The packing plan."""
    with stage_bar(STAGE.name) as progress:

        def compute(_key: str, work: Path) -> Produced:
            report = plan(folder_of(context, encoded), packing, work, progress)
            return Produced(
                summary={"headline": f"{report['samples']} samples in {report['rows']} rows, {report['fill']:.1%} full"} | report
            )

        return ended(run_step(context, wanted_plan(packing, encoded), compute=compute, say=say_in_run()))
