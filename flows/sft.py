"""Supervised fine-tuning: the order of the stages."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.begin import begin
from flows.params import SFTParams
from tasks.context import finish
from tasks.encode import encode_task
from tasks.evaluate import HeldOut, evaluate_base_task, evaluate_task
from tasks.export import export_task
from tasks.pack import pack_task
from tasks.preprocess import preprocess_task
from tasks.publish import outcome, publish_task
from tasks.report import report_task
from tasks.shard import shard_task
from tasks.train_sft import TrainSettings, train_task
from twinkle_core.types import Kind

LEARNS: tuple[Kind, ...] = ("conversation", "text")


def _run_name() -> str:
    params: Any = flow_run.parameters["params"]
    publish = params.publish if isinstance(params, SFTParams) else SFTParams.model_validate(params).publish
    return f"sft {publish.name}"


@flow(name="sft", flow_run_name=_run_name, persist_result=False)
def sft(params: SFTParams) -> dict[str, Any]:
    """From rows to a published model. Gives where release and report are.

    Each task returns the state it ends in (`Completed` or `Reused`), hence `.result()`.
    """
    context, p = begin("sft", params)
    trajectories = preprocess_task(context, p.data, LEARNS).result()
    encoded = encode_task(context, p.model, p.template, trajectories).result()
    plan = pack_task(context, p.packing, encoded).result()
    shards = shard_task(context, p.shard, encoded, plan).result()
    data = HeldOut(template=p.template, trajectories=trajectories, encoded=encoded)
    before = evaluate_base_task(context, p.model, p.evaluate, data).result()
    settings = TrainSettings(model=p.model, train=p.train, checkpoint=p.checkpoint, resources=p.resources)
    checkpoint = train_task(context, settings, shards).result()
    model = export_task(context, p.model, p.export, p.template, checkpoint).result()
    after = evaluate_task(context, p.model, p.evaluate, data, model).result()
    report = report_task(context, p.model, p.publish, before, after, checkpoint).result()
    release = publish_task(context, p.model, p.publish, model, report).result()
    finish(context)
    return outcome(context, release, report)
