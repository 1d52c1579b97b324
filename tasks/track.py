"""Where training reports to while it runs: MLflow, and Prefect's progress artifact."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException

from storage import layout
from storage.artifact import list_records
from storage.lease import read_lease
from tasks.context import Context
from twinkle_core.checkpoint.save import read_history
from twinkle_core.config import TrainConfig
from twinkle_core.tracking.mlflow import (
    SQLITE,
    STORE_TAG,
    MlflowTracker,
    RunIdentity,
    away_errors,
    client,
    complete_run,
    find_run,
    log_outcome,
    reap,
)
from twinkle_core.types import Progress

EXPERIMENT = "twinkle"
ARTIFACT_SECONDS = 5.0


def identity(context: Context, train_key: str) -> RunIdentity:
    """The MLflow run of a train key: one a model, whatever runs and retries it took."""
    name = context.spec.params.get("publish", {}).get("name", "model")
    home = context.settings.home
    uri = context.settings.mlflow_uri
    local = uri is None or uri.startswith(SQLITE) or urlsplit(uri).hostname in ("127.0.0.1", "localhost")
    return RunIdentity(
        uri=uri or f"sqlite:///{home}/mlflow.db",
        experiment=EXPERIMENT,
        artifact_location=(home / "mlflow-artifacts").as_uri() if local else None,
        train_key=train_key,
        store_id=context.store.identity(),
        name=f"{name} {train_key[:8]}",
    )


@contextmanager
def tracked(context: Context, train_key: str, train: TrainConfig, say: Callable[[str], None]) -> Iterator[MlflowTracker]:
    """A tracker whose MLflow run ends FINISHED, or FAILED on any error."""
    tags = {"twinkle.run_id": context.spec.run_id, "twinkle.flow": context.spec.flow, STORE_TAG: context.store.identity()}
    tracker = MlflowTracker(identity(context, train_key), params={"train": train.recipe_dump()}, tags=tags, warn=say)
    try:
        yield tracker
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")


def send_outcome(
    context: Context,
    train_key: str,
    *,
    report_key: str,
    metrics: Mapping[str, float],
    documents: Mapping[str, str],
    report: Path,
    say: Callable[[str], None],
) -> None:
    """Evaluation numbers, recipe, records and report to the model's MLflow run. MLflow being away is said, and stops nothing."""
    who = identity(context, train_key)
    try:
        run_id = find_run(client(who.uri), EXPERIMENT, train_key)
        if run_id is None:
            say(f"MLflow at {who.uri} has no run of training {train_key[:12]}; `twinkle reap` sends its curve")
        else:
            log_outcome(who.uri, run_id, report_key=report_key, metrics=metrics, documents=documents, files={"report": report})
    except away_errors() as error:
        say(f"MLflow: {error}; report and records are in the store")


def send_curves(context: Context) -> list[str]:
    """Sends what MLflow lacks of the curves of finished trainings; the runs that had gaps. For `twinkle reap`."""
    filled = []
    for record in list_records(context.store, "train", skip_unreadable=True):
        history = read_history(context.store.get(f"{record.prefix}/history.jsonl"))
        if (run_id := complete_run(identity(context, record.key), history)) is not None:
            filled.append(run_id)
    return filled


def reap_runs(context: Context) -> list[str]:
    """Ends MLflow runs that say RUNNING while no living process trains them."""

    def alive(train_key: str) -> bool:
        info = read_lease(context.store, layout.lease_key("train", train_key)) if train_key else None
        return info is not None and info.alive()

    return reap(identity(context, "").uri, EXPERIMENT, context.store.identity(), alive)


class LiveProgress:
    """A stage's bar, doubled as a Prefect progress artifact by a side thread: Prefect being slow or away holds up nothing.

    Use as a context manager inside a task run.
    """

    def __init__(self, bar: Progress, description: str) -> None:
        self._bar, self._description = bar, description
        self._total: int | None = None
        self._done = 0
        self._ended = threading.Event()
        # The copied context carries the task run, so that the artifact is shown with it.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._work,), name="progress-artifact", daemon=True)

    def __enter__(self) -> LiveProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(ARTIFACT_SECONDS)

    def start(self, description: str, total: int | None, unit: str) -> None:
        self._bar.start(description, total, unit)
        self._total, self._done = total, 0

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        self._bar.advance(amount, **facts)
        self._done += amount

    def _work(self) -> None:
        artifact: UUID | None = None
        shown = -1.0
        while True:
            last = self._ended.wait(ARTIFACT_SECONDS)
            percent = 100.0 * self._done / self._total if self._total else 0.0
            try:
                if artifact is None:
                    artifact = cast(UUID, create_progress_artifact(progress=percent, key="train-progress", description=self._description))
                elif percent != shown:
                    update_progress_artifact(artifact, progress=percent)
                shown = percent
            except (httpx.HTTPError, PrefectException, OSError):
                artifact = None
            if last:
                return
