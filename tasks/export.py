"""Checkpoint + base model → a model folder that loads by itself."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef
from tasks.artifacts import folder_of
from tasks.base_model import resolve, tokenizer_ref, weights_ref
from tasks.console import stage_bar
from tasks.context import Context
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import ExportConfig, ModelConfig, TemplateConfig
from twinkle_core.hub.resolve import ModelSource

STAGE = Stage(name="export", version=2, modules=("twinkle_core.checkpoint.export", "twinkle_core.checkpoint.export_files"))


def wanted_model(base: ModelSource, config: ExportConfig, template: TemplateConfig, checkpoint: ArtifactRef) -> Wanted:
    """The folder holds tokenizer and chat template too: a model is published with the template it was trained with."""
    inputs = {"checkpoint": checkpoint, "base_model": weights_ref(base), "tokenizer": tokenizer_ref(base)}
    return Wanted(stage=STAGE, recipe=config.recipe_dump() | {"chat_template": template.chat_template}, inputs=inputs)


@task(name="export", **TASK_OPTIONS)
def export_task(
    context: Context, model: ModelConfig, config: ExportConfig, template: TemplateConfig, checkpoint: ArtifactRef
) -> State[ArtifactRef]:
    """The model folder: merged, or the adapter alone."""
    base = resolve(context, model)
    with stage_bar(STAGE.name) as progress:

        def compute(_key: str, work: Path) -> Produced:
            from twinkle_core.checkpoint.export import export

            progress.start(STAGE.name, None, "files")
            summary = export(base.materialise(), folder_of(context, checkpoint), config, work, base_name=base.name)
            if template.chat_template is not None:
                (work / "chat_template.jinja").write_text(template.chat_template, encoding="utf-8")
            headline = f"{config.form} {config.dtype}, {summary['num_bytes'] / 1e6:,.0f} MB"
            return Produced(summary={"headline": headline} | summary)

        return ended(run_step(context, wanted_model(base, config, template, checkpoint), compute=compute, say=say_in_run()))
