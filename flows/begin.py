"""What every flow does first: freeze its settings, and close what died before it."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run

from tasks.context import Context, RunSpec, code_versions, freeze
from tasks.settings import Settings
from twinkle_core.config import Config


def begin(flow: str, params: Config) -> tuple[Context, Any]:
    """The run's context and its frozen settings: a retry gets those it began with, not those it was called with."""
    logger = get_run_logger()
    settings = Settings.from_env()
    spec = RunSpec(run_id=str(flow_run.id), flow=flow, params=params.model_dump(mode="json"), code=code_versions())
    frozen, changes = freeze(settings, spec)
    for change in changes:
        logger.warning("this run began with other code: %s; finished stages keep their results", change)
    return Context(settings=settings, spec=frozen), type(params).model_validate(frozen.params)
