"""A model and held-out rows → numbers and generated answers; the base model is measured the same way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.states import State

from storage.artifact import ArtifactRef, SourceRef
from tasks.artifacts import folder_of
from tasks.base_model import resolve, tokenizer_ref, weights_ref
from tasks.console import StageProgress, stage_bar
from tasks.context import Context, to_json
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import EvaluateConfig, ExportConfig, ModelConfig, TemplateConfig
from twinkle_core.hub.resolve import ModelSource

STAGE = Stage(
    name="evaluate",
    version=3,
    modules=(
        "twinkle_core.evaluator.generate",
        "twinkle_core.evaluator.held_out_loss",
        "twinkle_core.evaluator.run",
        "twinkle_core.evaluator.scorers",
        "twinkle_core.sharding.columns",
        "twinkle_core.sharding.reader",
        "twinkle_core.template",
    ),
)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What models are measured on."""

    template: TemplateConfig
    trajectories: ArtifactRef
    encoded: ArtifactRef


def wanted_evaluation(base: ModelSource, model: ArtifactRef | SourceRef, config: EvaluateConfig, data: HeldOut) -> Wanted:
    """Of the base model (`weights_ref(base)`) or of an exported one, which may be an adapter and then needs the base."""
    inputs: dict[str, ArtifactRef | SourceRef] = {
        "model": model,
        "base_model": weights_ref(base),
        "tokenizer": tokenizer_ref(base),
        "trajectories": data.trajectories,
        "encoded": data.encoded,
    }
    return Wanted(stage=STAGE, recipe=config.recipe_dump() | {"template": data.template.recipe_dump()}, inputs=inputs)


@task(name="evaluate base", **TASK_OPTIONS)
def evaluate_base_task(context: Context, model: ModelConfig, config: EvaluateConfig, data: HeldOut) -> State[ArtifactRef]:
    """Numbers and answers of the base model: made once, whatever is trained from it."""
    base = resolve(context, model)
    return _evaluate(context, base, wanted_evaluation(base, weights_ref(base), config, data), config, data, None)


@task(name="evaluate", **TASK_OPTIONS)
def evaluate_task(context: Context, model: ModelConfig, config: EvaluateConfig, data: HeldOut, exported: ArtifactRef) -> State[ArtifactRef]:
    """Numbers and answers of the exported model."""
    base = resolve(context, model)
    return _evaluate(context, base, wanted_evaluation(base, exported, config, data), config, data, exported)


def _evaluate(
    context: Context, base: ModelSource, wanted: Wanted, config: EvaluateConfig, data: HeldOut, exported: ArtifactRef | None
) -> State[ArtifactRef]:
    with stage_bar("evaluate" if exported else "evaluate base") as progress:

        def compute(_key: str, work: Path) -> Produced:
            began = time.monotonic()
            folder = (
                base.materialise() if exported is None else _whole_model(context, base, exported, context.scratch / f"{work.name}-merged")
            )
            result = _measure(context, folder, config, data, progress)
            (work / "evaluation.json").write_text(to_json(result), encoding="utf-8")
            numbers = result["numbers"]["all"]
            headline = f"held-out loss {_number(numbers['loss'])}, accuracy {_number(numbers['answer_accuracy'])}"
            return Produced(summary={"headline": headline, "numbers": result["numbers"], "seconds": round(time.monotonic() - began, 3)})

        return ended(run_step(context, wanted, compute=compute, say=say_in_run()))


def _measure(context: Context, folder: Path, config: EvaluateConfig, data: HeldOut, progress: StageProgress) -> dict[str, object]:
    from twinkle_core.evaluator.run import evaluate_model, source_of
    from twinkle_core.preprocessor.run import read_trajectories
    from twinkle_core.sharding.reader import EncodedDataset
    from twinkle_core.template import template_class

    held_out = list(read_trajectories(folder_of(context, data.trajectories) / "held_out.jsonl"))
    encoded = EncodedDataset(folder_of(context, data.encoded), "held_out")
    rows = encoded.rows()
    template = template_class(data.template.name)(folder, data.template)
    return evaluate_model(
        folder,
        [held_out[row] for row in sorted(set(rows))],  # truncation 'split' makes several samples of a row
        [encoded[i] for i in range(len(encoded))],
        config,
        progress,
        sources=[source_of(held_out[row]) for row in rows],
        render_prompt=template.render_prompt,
    )


def _whole_model(context: Context, base: ModelSource, exported: ArtifactRef, merged: Path) -> Path:
    """The exported folder, or, of an adapter, a merged copy to measure."""
    from twinkle_core.checkpoint.export import export

    folder = folder_of(context, exported)
    if (folder / "config.json").exists():
        return folder
    export(base.materialise(), folder, ExportConfig(form="merged", dtype="float32"), merged)
    return merged


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
