"""Metric rows to MLflow, once each and live, from a side thread that never raises into the training loop.

The run of a model is found by its train key, so a resumed training goes on in the same run. What MLflow already has is
asked for at the start and not sent again; the rows a kill cut off come with the replayed steps and with the checkpoint's
history, with the times they were first seen at. A resume is marked in the tag `twinkle.resumed_after_steps`. While MLflow is
away rows wait (they are in the checkpoints too) and are sent later. The only module that imports mlflow, and only inside
functions: it takes over a second.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.tracking.params import flatten, param_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY_TAG = "twinkle.train_key"
STORE_TAG = "twinkle.store"
REPORT_TAG = "twinkle.report"
SQLITE = "sqlite:///"
_MARK = "resumed_after_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Which MLflow run a training belongs to."""

    uri: str
    experiment: str
    artifact_location: str | None
    """Where a new experiment keeps artifacts; None leaves it to the server."""
    train_key: str
    store_id: str
    """Which store its artifacts are in (`Store.identity`): who else uses this MLflow leaves its runs alone."""
    name: str


class MlflowTracker:
    """Sends metric rows (one an optimizer step) to the MLflow run of a train key."""

    def __init__(
        self,
        identity: RunIdentity,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        warn: Callable[[str], None],
        retry_seconds: float = 5.0,
    ) -> None:
        self._identity, self._params, self._tags, self._warn, self._retry_seconds = identity, params, tags, warn, retry_seconds
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stop = threading.Event()
        run = contextvars.copy_context().run  # carries whatever `warn` logs to
        self._thread = threading.Thread(target=run, args=(self._work,), name="mlflow-tracker", daemon=True)
        self.run_id: str | None = None
        self._is_current: Callable[[], bool] = lambda: True
        self._thread.start()

    def resume(self, history: Iterable[dict[str, Any]], *, is_current: Callable[[], bool] = lambda: True) -> None:
        """Hands over the rows up to the checkpoint; those MLflow lacks are filled in. While `is_current` is false nothing is sent."""
        self._is_current = is_current
        rows = list(history)
        for row in rows:
            self._rows.put(row)
        if rows:
            self._rows.put({_MARK: rows[-1]["step"]})

    def log(self, row: dict[str, Any]) -> None:
        """Queues a row; returns at once."""
        self._rows.put(row)

    def close(self, status: str, *, timeout_seconds: float = 60.0) -> bool:
        """Sends what is left, sets the run's status (FINISHED, FAILED, KILLED); False when MLflow stayed away too long."""
        self._rows.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive() or self.run_id is None:
            self._stop.set()
            self._warn(f"MLflow at {self._identity.uri} is away; the curve is kept in the checkpoint and sent by the next run or `reap`")
            return False
        try:
            if not self._is_current():
                return False
            self._client().set_terminated(self.run_id, status=status)
        except away_errors() as error:
            self._warn(f"MLflow: {error}; `twinkle reap` ends the run")
            return False
        return True

    def _client(self) -> MlflowClient:
        return client(self._identity.uri)

    def _work(self) -> None:
        sent: set[tuple[str, int]] | None = None
        waiting: list[dict[str, Any]] = []
        ended = False
        while not self._stop.is_set() and not (ended and not waiting):
            fresh, ended = _drain(self._rows, block=not waiting and not ended, ended=ended)
            waiting += fresh
            try:
                if sent is None:
                    self.run_id, sent = self._attach()
                if not self._is_current():
                    # Overtaken: by another process, whose run it is now, or by the next attempt of this one, which calls `resume`.
                    if ended:
                        return
                    self._stop.wait(self._retry_seconds / 10)
                    continue
                send_missing(self._client(), self.run_id, waiting, sent)
                waiting = []
            except away_errors() as error:
                self._warn(f"MLflow: {error}; {len(waiting)} rows wait")
                self._stop.wait(self._retry_seconds)

    def _attach(self) -> tuple[str, set[tuple[str, int]]]:
        api = self._client()
        run_id = find_run(api, self._identity.experiment, self._identity.train_key)
        if run_id is None:
            run_id = _create_run(api, self._identity)
        for key, value in self._tags.items():  # before RUNNING: `reap` finds a run by them
            api.set_tag(run_id, key, value)
        api.update_run(run_id, status="RUNNING")
        _log_params(api, run_id, self._params)
        return run_id, _already_sent(api, run_id)


def client(uri: str) -> MlflowClient:
    """A client of the tracking store at `uri`; no global tracking URI is touched."""
    from mlflow import MlflowClient

    if uri.startswith(SQLITE):
        create_database(Path(uri.removeprefix(SQLITE)))
    return MlflowClient(tracking_uri=uri)


def create_database(path: Path) -> None:
    """Makes MLflow's SQLite database where there is none; it appears whole or not at all.

    MLflow itself creates the tables in place, over seconds, and can never use a database whose creation was cut off.
    """
    from mlflow import MlflowClient

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.draft")
    MlflowClient(tracking_uri=f"{SQLITE}{draft}").search_experiments(max_results=1)
    with suppress(FileExistsError):  # somebody else was faster: theirs stands
        os.link(draft, path)
    draft.unlink()


def away_errors() -> tuple[type[Exception], ...]:
    """What an unreachable tracking store raises."""
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (OSError, MlflowException, SQLAlchemyError, requests.RequestException)


def find_run(api: MlflowClient, experiment: str, train_key: str) -> str | None:
    """Id of the run of a train key, or None."""
    found = api.get_experiment_by_name(experiment)
    if found is None:
        return None
    runs = api.search_runs([found.experiment_id], f"tags.`{KEY_TAG}` = '{train_key}'", max_results=1)
    return runs[0].info.run_id if runs else None


def send_missing(api: MlflowClient, run_id: str, rows: Iterable[dict[str, Any]], sent: set[tuple[str, int]]) -> None:
    """Sends each (metric, step) of `rows` that is not in `sent`, with the row's own time, and adds it there."""
    from mlflow.entities import Metric

    for row in rows:
        if _MARK in row:
            marks = api.get_run(run_id).data.tags.get("twinkle.resumed_after_steps", "")
            api.set_tag(run_id, "twinkle.resumed_after_steps", f"{marks},{row[_MARK]}".lstrip(","))
            continue
        names = [name for name in row if name not in ("step", "time") and (name, row["step"]) not in sent]
        if names:
            api.log_batch(run_id, metrics=[Metric(name, float(row[name]), int(row["time"] * 1000), row["step"]) for name in names])
            sent.update((name, row["step"]) for name in names)


def reap(uri: str, experiment: str, store_id: str, alive: Callable[[str], bool]) -> list[str]:
    """Ends as KILLED each run of this store that says RUNNING while nobody trains its key (not `alive(train_key)`); their ids."""
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists():
        return []
    api = client(uri)
    found = api.get_experiment_by_name(experiment)
    if found is None:
        return []
    ended = []
    for run in api.search_runs([found.experiment_id], f"attributes.status = 'RUNNING' and tags.`{STORE_TAG}` = '{store_id}'"):
        run_id = run.info.run_id
        # Asked again: a training that ended between the search and now has said FINISHED before it gave up its lease.
        if not alive(run.data.tags.get(KEY_TAG, "")) and api.get_run(run_id).info.status == "RUNNING":
            api.set_terminated(run_id, status="KILLED")
            ended.append(run_id)
    return ended


def complete_run(identity: RunIdentity, history: list[dict[str, Any]]) -> str | None:
    """Brings the run of a finished training up to its history and ends it FINISHED; its id if anything was lacking, else None."""
    api = client(identity.uri)
    run_id = find_run(api, identity.experiment, identity.train_key) or _create_run(api, identity)
    sent = _already_sent(api, run_id)
    before = len(sent)
    send_missing(api, run_id, history, sent)
    if len(sent) == before and api.get_run(run_id).info.status == "FINISHED":
        return None
    api.set_terminated(run_id, status="FINISHED")
    return run_id


def log_outcome(
    uri: str,
    run_id: str,
    *,
    report_key: str,
    metrics: Mapping[str, float],
    documents: Mapping[str, str],
    files: Mapping[str, Path],
) -> None:
    """Adds metrics, text artifacts (path → text) and files (artifact folder → file) to a run that may have ended.

    Does nothing where the run has this report already: the tag that says so is set last, so what a kill cut off is sent again.
    """
    api = client(uri)
    if api.get_run(run_id).data.tags.get(REPORT_TAG) == report_key:
        return
    now = int(time.time() * 1000)
    for name, value in metrics.items():
        api.log_metric(run_id, name, value, timestamp=now, step=0)
    for path, text in documents.items():
        api.log_text(run_id, text, path)
    for folder, file in files.items():
        api.log_artifact(run_id, str(file), folder)
    api.set_tag(run_id, REPORT_TAG, report_key)


def _create_run(api: MlflowClient, identity: RunIdentity) -> str:
    from mlflow.exceptions import MlflowException

    found = api.get_experiment_by_name(identity.experiment)
    if found is None:
        try:
            experiment_id = api.create_experiment(identity.experiment, artifact_location=identity.artifact_location)
        except MlflowException:  # another run created it between the look and the call
            found = api.get_experiment_by_name(identity.experiment)
            if found is None:
                raise
            experiment_id = found.experiment_id
    else:
        experiment_id = found.experiment_id
    run = api.create_run(experiment_id, run_name=identity.name, tags={KEY_TAG: identity.train_key, STORE_TAG: identity.store_id})
    return run.info.run_id


def _log_params(api: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    known = api.get_run(run_id).data.params
    new = [Param(key, param_text(value)) for key, value in flatten(params).items() if key not in known]
    for start in range(0, len(new), 100):
        api.log_batch(run_id, params=new[start : start + 100])


def _already_sent(api: MlflowClient, run_id: str) -> set[tuple[str, int]]:
    names = api.get_run(run_id).data.metrics
    return {(name, point.step) for name in names for point in api.get_metric_history(run_id, name)}


def _drain(rows: queue.Queue[dict[str, Any] | None], *, block: bool, ended: bool) -> tuple[list[dict[str, Any]], bool]:
    taken: list[dict[str, Any]] = []
    while not ended:
        try:
            row = rows.get(block=block and not taken)
        except queue.Empty:
            break
        if row is None:
            ended = True
        else:
            taken.append(row)
    return taken, ended
