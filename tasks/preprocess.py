"""Source rows → trajectories, split into train and held-out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef, SourceRef
from tasks.console import stage_bar
from tasks.context import Context
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import DataConfig
from twinkle_core.errors import DataError
from twinkle_core.preprocessor.run import VERSION, preprocess
from twinkle_core.preprocessor.sources import open_source
from twinkle_core.preprocessor.trusted_code import code_digest, names_user_code
from twinkle_core.types import Kind

STAGE = Stage(name="preprocess", version=VERSION, modules=("twinkle_core.preprocessor",))


def public_uri(uri: str | tuple[str, ...]) -> str:
    """The address as it is recorded: of a local file its name alone, of many the first."""
    if not isinstance(uri, str):
        first, *others = uri
        return f"{public_uri(first)} and {len(others)} more" if others else public_uri(first)
    return uri if "://" in uri and not uri.startswith("file://") else Path(uri).name


def sources_cache(context: Context) -> Path:
    """Where files of hubs are kept."""
    return context.cache / "datasets"


def wanted_trajectories(context: Context, data: DataConfig) -> Wanted:
    """The sources are inputs by content, and so is the user's own code that they name; where they lie is no part of it."""
    opened = {config.name: open_source(config, cache=sources_cache(context)) for config in data.sources}
    inputs = {
        f"source {config.name}": SourceRef(name=config.name, uri=public_uri(config.uri), digest=opened[config.name].digest())
        for config in data.sources
    }
    named = [config.processor for config in data.sources if config.processor] + [config.name for config in data.filters]
    for name in filter(names_user_code, named):
        inputs[f"code {name}"] = SourceRef(name=name, uri=name, digest=code_digest(name, context.settings.trusted_code))
    return Wanted(stage=STAGE, recipe=data.recipe_dump(), inputs=inputs)


def check_fit(report: Mapping[str, Any], learns: Collection[Kind]) -> None:
    """Raises `DataError` where a training that learns from these kinds could not use the rows, or could measure nothing."""
    for name, source in report["sources"].items():
        if other := sorted(set(source["kinds"]) - set(learns)):
            counts = ", ".join(f"{source['kinds'][kind]} of kind '{kind}'" for kind in other)
            raise DataError(
                f"source '{name}' (format {source['format']}) has {counts}, but this flow learns from {' and '.join(sorted(learns))}: "
                "leave the source out, or name its format if it was not meant so (flow prepare takes all kinds)"
            )
    if not report["held_out"]:
        raise DataError("no row is held out, so the release gate could compare nothing: raise held_out on a source, or give more rows")


@task(name="preprocess", **TASK_OPTIONS)
def preprocess_task(context: Context, data: DataConfig, learns: Collection[Kind] | None = None) -> State[ArtifactRef]:
    """The trajectories of all sources. `learns`: the kinds that the flow trains on and measures; None where it only prepares them."""
    with stage_bar(STAGE.name) as progress:

        def compute(key: str, work: Path) -> Produced:
            trusted_code = context.settings.trusted_code
            report = preprocess(data, work, progress, cache=sources_cache(context), trusted_code=trusted_code)
            if learns is not None:
                check_fit(report, learns)
            if wanted_trajectories(context, data).key != key:
                raise DataError("a source or the code for it changed while it was read, so its rows have no digest: run again")
            return Produced(summary={"headline": f"{report['train']} rows to learn, {report['held_out']} held out"} | report)

        result = run_step(context, wanted_trajectories(context, data), compute=compute, say=say_in_run())
        if learns is not None:
            check_fit(result.record.summary, learns)  # a reused artifact may have been made for another flow
        return ended(result)
