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
from twinkle_core.errors import DataError
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


def public_uri(uri: str) -> str:
    """The address as it is recorded: of a local file its name alone."""
    return uri if "://" in uri and not uri.startswith("file://") else Path(uri).name


def wanted_trajectories(data: DataConfig) -> Wanted:
    """The sources are inputs by content; where they lie is no part of it."""
    refs = [SourceRef(name=config.name, uri=public_uri(config.uri), digest=open_source(config).digest()) for config in data.sources]
    sources = {f"source {ref.name}": ref for ref in refs}
    return Wanted(stage=STAGE, recipe=data.recipe_dump(), inputs=sources)


@task(name="preprocess", **TASK_OPTIONS)
def preprocess_task(context: Context, data: DataConfig) -> State[ArtifactRef]:
    """The trajectories of all sources."""
    with stage_bar(STAGE.name) as progress:

        def compute(key: str, work: Path) -> Produced:
            report = preprocess(data, work, progress)
            if not report["held_out"]:
                raise DataError(
                    "no row is held out, so the release gate could compare nothing: raise held_out on a source, or give more rows"
                )
            if wanted_trajectories(data).key != key:
                raise DataError("a source changed while it was read, so its rows have no digest: run again when nothing writes to it")
            return Produced(summary={"headline": f"{report['train']} rows to learn, {report['held_out']} held out"} | report)

        return ended(run_step(context, wanted_trajectories(data), compute=compute, say=say_in_run()))
