"""How a stage shows in Prefect: its log, and `Reused` or `Completed` as its end."""

from __future__ import annotations

from collections.abc import Callable

from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Completed, State

from storage.artifact import ArtifactRef
from tasks.console import CONSOLE
from tasks.step import StepResult

TASK_OPTIONS = {"cache_policy": NO_CACHE, "persist_result": False, "log_prints": False}
"""Prefect's own result cache stays off: the store's records decide what is done (`tasks/step.py`)."""


def say_in_run() -> Callable[[str], None]:
    """A function that writes a line to the run's log and to the terminal."""
    logger = get_run_logger()

    def say(text: str) -> None:
        logger.info(text)
        CONSOLE.print(f"  {text}", highlight=False, markup=False, style="dim", soft_wrap=True)

    return say


def ended(result: StepResult) -> State[ArtifactRef]:
    """The state a stage's task ends in; its data is the `ArtifactRef`."""
    what = "reused" if result.reused else "made"
    line = f"{what:<7} {result.ref.stage:<11} {result.ref.key[:12]}  {result.record.summary.get('headline', '')}"
    CONSOLE.print(line, highlight=False, markup=False, soft_wrap=True)
    get_run_logger().info(result.reason)
    if result.reused:
        return Completed(name="Reused", message=result.reason, data=result.ref)
    return Completed(message=f"computed: {result.reason}", data=result.ref)
