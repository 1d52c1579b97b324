"""Data only: the order of the stages from rows to shards. A later training with the same settings reuses all of it."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.begin import begin
from flows.params import PrepareParams
from storage.uri import join
from tasks.artifacts import record_of
from tasks.context import finish
from tasks.encode import encode_task
from tasks.pack import pack_task
from tasks.preprocess import preprocess_task
from tasks.shard import shard_task


@flow(name="prepare", flow_run_name="prepare", persist_result=False)
def prepare(params: PrepareParams) -> dict[str, Any]:
    """From rows to shards. Gives where they are."""
    context, p = begin("prepare", params)
    trajectories = preprocess_task(context, p.data).result()
    encoded = encode_task(context, p.model, p.template, trajectories).result()
    plan = pack_task(context, p.packing, encoded).result()
    shards = shard_task(context, p.shard, encoded, plan).result()
    finish(context)
    prefix = record_of(context, shards).prefix
    return {"shards": str(context.store.local_path(prefix) or join(context.store.url, prefix))}
