"""Source rows → trajectories, split into train and held-out."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef, SourceRef
from tasks.console import stage_bar
from tasks.context import Context
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import DataConfig
from twinkle_core.dataset.sources import open_source
from twinkle_core.preprocessor.run import VERSION, preprocess

STAGE = Stage(
    name="preprocess",
    version=VERSION,
    modules=(
        "twinkle_core.preprocessor.sources",
        "twinkle_core.preprocessor.formats",
        "twinkle_core.preprocessor.run",
        "twinkle_core.preprocessor.self_cognition",
        "twinkle_core.preprocessor.split",
    ),
)


def wanted_trajectories(data: DataConfig) -> Wanted:
    """The sources are inputs by content; where they lie is no part of it."""
    sources = {
        f"source {config.name}": SourceRef(name=config.name, uri=config.uri, digest=open_source(config).digest()) for config in data.sources
    }
    return Wanted(stage=STAGE, recipe=data.recipe_dump(), inputs=sources)


@task(name="preprocess", **TASK_OPTIONS)
def preprocess_task(context: Context, data: DataConfig) -> State[ArtifactRef]:
    """The trajectories of all sources."""
    with stage_bar(STAGE.name) as progress:

        def compute(_key: str, work: Path) -> Produced:
            report = preprocess(data, work, progress)
            return Produced(summary={"headline": f"{report['train']} rows to learn, {report['held_out']} held out"} | report)

        return ended(run_step(context, wanted_trajectories(data), compute=compute, say=say_in_run()))
