"""Trajectories → token ids and labels."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef
from tasks.artifacts import folder_of
from tasks.base_model import resolve, tokenizer_ref
from tasks.console import stage_bar
from tasks.context import Context
from tasks.parts import StoredParts
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import ModelConfig, TemplateConfig
from twinkle_core.hub.resolve import ModelSource
from twinkle_core.template import template_class
from twinkle_core.template.run import VERSION, encode

STAGE = Stage(
    name="encode",
    version=VERSION,
    modules=("twinkle_core.template",),
)


def wanted_encoded(base: ModelSource, template: TemplateConfig, trajectories: ArtifactRef) -> Wanted:
    """Of the base model only the tokenizer matters here."""
    inputs = {"trajectories": trajectories, "tokenizer": tokenizer_ref(base)}
    return Wanted(stage=STAGE, recipe=template.recipe_dump(), inputs=inputs)


@task(name="encode", **TASK_OPTIONS)
def encode_task(context: Context, model: ModelConfig, template: TemplateConfig, trajectories: ArtifactRef) -> State[ArtifactRef]:
    """The encoded samples, train and held-out."""
    base = resolve(context, model)
    with stage_bar(STAGE.name) as progress:

        def compute(key: str, work: Path) -> Produced:
            made = template_class(template.name)(base.materialise(), template)
            with StoredParts(context.store, STAGE.name, key) as parts:
                report = encode(folder_of(context, trajectories), made, work, progress, parts=parts)
                stored = parts.stored(work)
            learnt = report["train"]
            headline = f"{learnt['documents']} documents, {learnt['tokens']} tokens, {learnt['supervised_tokens']} supervised"
            return Produced(summary={"headline": headline} | report, stored=stored)

        return ended(run_step(context, wanted_encoded(base, template, trajectories), compute=compute, say=say_in_run()))
