"""What every flow does first: freeze its settings, and close what died before it."""

from __future__ import annotations

import contextvars
import logging
import threading
from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run

from tasks.context import Context, RunSpec, code_versions, freeze
from tasks.settings import Settings
from tasks.track import reap_runs
from twinkle_core.config import Config
from twinkle_core.tracking.mlflow import away_errors

Logger = logging.Logger | logging.LoggerAdapter[Any]


def begin(flow: str, params: Config) -> tuple[Context, Any]:
    """The run's context and its frozen settings: a retry gets those it began with, not those it was called with."""
    logger = get_run_logger()
    settings = Settings.from_env()
    spec = RunSpec(run_id=str(flow_run.id), flow=flow, params=params.model_dump(mode="json"), code=code_versions())
    frozen, changes = freeze(settings, spec)
    for change in changes:
        logger.warning("this run began with other code: %s; finished stages keep their results", change)
    context = Context(settings=settings, spec=frozen)
    # Beside the run: MLflow's client asks a server that is away for minutes. The copied context carries Prefect's settings for the log.
    threading.Thread(target=contextvars.copy_context().run, args=(_close_dead_runs, context, logger), name="reap", daemon=True).start()
    return context, type(params).model_validate(frozen.params)


def _close_dead_runs(context: Context, logger: Logger) -> None:
    try:
        for run_id in reap_runs(context):
            logger.info("MLflow run %s said RUNNING, but nobody trains it any more; ended as KILLED", run_id)
    except away_errors() as error:
        logger.warning("MLflow: %s; `twinkle reap` ends the runs of trainings that died", error)
