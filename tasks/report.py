"""Both evaluations, the training's history and the lineage → the verdict of the gate, and the page that people look at."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.states import State

from storage.artifact import ArtifactRecord, ArtifactRef, SourceRef
from tasks.artifacts import folder_of, lineage, read_json, record_of
from tasks.base_model import resolve
from tasks.context import Context, to_json
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.step import Produced, Stage, StepResult, Wanted, run_step
from tasks.track import send_outcome
from twinkle_core.checkpoint.save import read_history
from twinkle_core.config import ModelConfig, PublishConfig

SEND_SECONDS = 20.0
STAGE = Stage(name="report", version=1, modules=("twinkle_core.evaluator.gate",))


def wanted_report(publish: PublishConfig, before: ArtifactRef, after: ArtifactRef, checkpoint: ArtifactRef) -> Wanted:
    """The gate's limits are its recipe."""
    gate = {"max_loss_increase": publish.max_loss_increase, "min_accuracy": publish.min_accuracy, "name": publish.name}
    return Wanted(stage=STAGE, recipe=gate, inputs={"before": before, "after": after, "checkpoint": checkpoint})


@task(name="report", **TASK_OPTIONS)
def report_task(
    context: Context, model: ModelConfig, publish: PublishConfig, before: ArtifactRef, after: ArtifactRef, checkpoint: ArtifactRef
) -> State[ArtifactRef]:
    """report.json (numbers and verdict) and report.html."""
    base_name = resolve(context, model).name

    def compute(_key: str, work: Path) -> Produced:
        from twinkle_core.evaluator.gate import gate
        from twinkle_core.evaluator.report import render

        old, new = read_json(context, before, "evaluation.json"), read_json(context, after, "evaluation.json")
        verdict = gate(old, new, publish)
        decided = {"passed": verdict.passed, "reasons": list(verdict.reasons)}
        seen = {"before": before.digest, "after": after.digest}
        numbers = {"verdict": decided, "before": old["numbers"], "after": new["numbers"], "evaluations": seen}
        (work / "report.json").write_text(to_json(numbers), encoding="utf-8")
        page = render(
            {
                "title": f"{publish.name}: {base_name}, fine-tuned",
                "created": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
                "release": publish.name,
                "verdict": {"passed": verdict.passed, "reasons": list(verdict.reasons)},
                "before": old,
                "after": new,
                "history": history_of(context, checkpoint),  # type: ignore[typeddict-item]
                "data": data_numbers(context, checkpoint),  # type: ignore[typeddict-item]
                "lineage": lineage_nodes(context, after),  # type: ignore[typeddict-item]
                "environment": environment(context, base_name),
            }
        )
        (work / "report.html").write_text(page, encoding="utf-8")
        headline = f"gate {'passed' if verdict.passed else 'NOT passed'}: {'; '.join(verdict.reasons)}"
        return Produced(summary={"headline": headline} | numbers, volatile=("report.html",))

    say = say_in_run()
    result = run_step(context, wanted_report(publish, before, after, checkpoint), compute=compute, say=say)
    _show_in_prefect(context, result)
    # Beside the run: MLflow may be away for minutes. Cut off at the end of the process, it is sent by the next run.
    in_context = contextvars.copy_context().run  # carries the run's log
    sender = threading.Thread(target=in_context, args=(_send_to_mlflow, context, result, checkpoint.key, say), daemon=True)
    sender.start()
    sender.join(SEND_SECONDS)
    return ended(result)


def history_of(context: Context, checkpoint: ArtifactRef) -> list[dict[str, Any]]:
    """The metric rows of every optimizer step."""
    return read_history((folder_of(context, checkpoint) / "history.jsonl").read_bytes())


def data_numbers(context: Context, checkpoint: ArtifactRef) -> dict[str, Any]:
    """Token statistics of what was trained on, from the records of shard, pack and encode."""
    shards = _input(context, record_of(context, checkpoint), "shards")
    plan, encoded = _input(context, shards, "plan"), _input(context, shards, "encoded")
    return {
        "rows": shards.summary["num_rows"],
        "documents": shards.summary["num_documents"],
        "tokens": shards.summary["num_tokens"],
        "loss_tokens": shards.summary["num_loss_tokens"],
        "packing_efficiency": plan.summary["fill"],
        "longest": encoded.summary["train"]["longest"],
    }


def lineage_nodes(context: Context, ref: ArtifactRef) -> list[dict[str, Any]]:
    """The artifact and all that it was made from, as the report draws them."""
    nodes = []
    for _, node in lineage(context, ref):
        if isinstance(node, SourceRef):
            nodes.append({"stage": "source", "key": _source_key(node), "digest": node.digest, "version": None, "inputs": []})
        else:
            inputs = [_source_key(item) if isinstance(item, SourceRef) else item.key for item in node.inputs.values()]
            nodes.append({"stage": node.stage, "key": node.key, "digest": node.digest, "version": node.version, "inputs": inputs})
    return nodes


def environment(context: Context, base_name: str) -> dict[str, str]:
    """Versions it was made with, for the page."""
    code = {name: str(value) for name, value in context.spec.code.items() if value is not None}
    return {"base model": base_name, "seed": str(context.spec.params.get("train", {}).get("seed", "–")), **code}


def _source_key(source: SourceRef) -> str:
    return f"{source.name} ({source.digest[:8]})"


def _input(context: Context, record: ArtifactRecord, name: str) -> ArtifactRecord:
    ref = record.inputs[name]
    assert isinstance(ref, ArtifactRef)
    return record_of(context, ref)


def _show_in_prefect(context: Context, result: StepResult) -> None:
    """For each run anew: every run has a page of its own."""
    before, after = result.record.summary["before"]["all"], result.record.summary["after"]["all"]
    rows = [{"measure": name, "before": before[name], "after": after[name]} for name in ("loss", "token_accuracy", "answer_accuracy")]
    create_table_artifact(table=rows, key="held-out", description=result.record.summary["headline"])
    create_link_artifact(link=(folder_of(context, result.ref) / "report.html").as_uri(), link_text="report.html", key="report")


def _send_to_mlflow(context: Context, result: StepResult, train_key: str, say: Callable[[str], None]) -> None:
    numbers = result.record.summary["after"]["all"]
    metrics = {f"eval.{name}": float(value) for name, value in numbers.items() if value is not None}
    made_from = [node for _, node in lineage(context, result.ref) if isinstance(node, ArtifactRecord)]
    records = {f"records/{node.stage}-{node.key[:12]}.json": node.to_json() for node in made_from}
    documents = {"recipe.json": context.spec.params} | records
    send_outcome(
        context,
        train_key,
        report_key=result.ref.key,
        metrics=metrics,
        documents={name: to_json(_without_paths(value)) for name, value in documents.items()},
        report=folder_of(context, result.ref) / "report.html",
        say=say,
    )


def _without_paths(value: Any) -> Any:
    """The same with local paths cut to their last part: where a file lay on this machine is nobody's business."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "file://", "~")):
        return value.rsplit("/", 1)[-1]
    return value
