"""Kills a training anywhere, runs it again, and compares the result with an undisturbed one, byte by byte.

A *victim* is a child process that runs the train stage on a small model. Every operation on the store and every step of the
model is an event; a `Kill` names the event at which the child kills itself with SIGKILL, before or after it, so that a seed gives
the same kill again. Later suites add events and victims here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from storage.artifact import ArtifactRef
from storage.store import open_store
from tasks.context import Context, RunSpec
from tasks.settings import Settings
from tasks.train_sft import TrainSettings, train
from twinkle_core.types import NoProgress

EVENTS: tuple[tuple[str, str], ...] = (
    ("storage.local:FileStore", "put"),
    ("storage.local:FileStore", "put_if_absent"),
    ("storage.local:FileStore", "compare_and_swap"),
    ("storage.local:FileStore", "upload"),
    ("storage.local:FileStore", "delete"),
    ("storage.local:FileStore", "_rename"),
    ("twinkle_core.model.transformers:TransformersModel", "forward_backward"),
    ("twinkle_core.model.transformers:TransformersModel", "clip_grad_and_step"),
    ("twinkle_core.model.transformers:TransformersModel", "begin_save"),
    ("twinkle_core.model.transformers:TransformersModel", "end_save"),
    ("twinkle_core.model.transformers:TransformersModel", "restore_from"),
    ("twinkle_core.model.checkpoint_files", "save_file"),
    ("twinkle_core.model.background_save", "upload_folder"),
)
"""What counts as an event: (class or module, function)."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A training that can be run again and again, in any home folder that holds its shards."""

    home: Path
    shards: ArtifactRef
    settings: TrainSettings
    environment: dict[str, str] = field(default_factory=dict)
    """What its processes need besides: TWINKLE_STORE for a store that is not in the home, and the settings of its server."""

    def context(self) -> Context:
        settings = Settings.from_env({**self.environment, "TWINKLE_HOME": str(self.home)})
        return Context(settings=settings, spec=RunSpec(run_id="chaos", flow="sft", params={}, code={}))

    def at(self, home: Path) -> Scene:
        return replace(self, home=home)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL at the `event`-th event of the process, before it happens or just after."""

    event: int
    before: bool


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a victim ended."""

    exitcode: int
    """0, or minus the signal that killed it."""
    num_events: int
    """Events counted; 0 when it was killed."""
    lines: tuple[str, ...]
    """What it said."""


def run_victim(scene: Scene, kill: Kill | None = None, timeout_seconds: float = 120) -> Ending:
    """Runs the train stage in a child process, to its end or to its death."""
    process, reports = start_victim(scene, kill)
    process.join(timeout_seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"the victim did not end in {timeout_seconds} s")
    try:
        report = reports.recv()
    except EOFError:  # it was killed before it could tell
        report = {"num_events": 0, "lines": []}
    if process.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the victim failed: {report}")
    return Ending(exitcode=process.exitcode, num_events=report["num_events"], lines=tuple(report["lines"]))


def start_victim(scene: Scene, kill: Kill | None = None) -> tuple[Any, Any]:
    """(process, connection) of a victim that runs. Children come from a server that has imported the heavy parts once."""
    spawner = multiprocessing.get_context("forkserver")
    spawner.set_forkserver_preload(["torch", "transformers", "peft", "mlflow", "ray", "prefect", "tests.chaos.harness"])
    ours, theirs = spawner.Pipe(duplex=False)
    process = spawner.Process(target=_victim, args=(scene, kill, theirs))
    process.start()
    theirs.close()
    return process, ours


def _victim(scene: Scene, kill: Kill | None, report: Any) -> None:
    counter = Counter(kill, EVENTS)
    counter.install()
    lines: list[str] = []
    try:
        train(scene.context(), scene.settings, scene.shards, progress=NoProgress(), say=lines.append)
    except BaseException as error:
        report.send({"num_events": counter.count, "lines": [*lines, repr(error)]})
        raise
    report.send({"num_events": counter.count, "lines": lines})


class Counter:
    """Counts events over all threads of the process, and kills it at the chosen one."""

    def __init__(self, kill: Kill | None, events: tuple[tuple[str, str], ...]) -> None:
        self.count = 0
        self._kill, self._events = kill, events
        self._lock = threading.Lock()

    def install(self) -> None:
        import importlib

        for path, method in self._events:
            module, _, name = path.partition(":")
            owner = importlib.import_module(module)
            owner = getattr(owner, name) if name else owner
            setattr(owner, method, self._counted(getattr(owner, method)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                mine = self._kill is not None and self.count == self._kill.event
            if mine and self._kill is not None and self._kill.before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished training left: everything that must not depend on how it got there."""

    digest: str
    """Content digest of the artifact."""
    files: dict[str, str]
    """sha256 of weights, optimizer, RNG and settings files, by name."""
    curve: tuple[tuple[Any, ...], ...]
    """(step, loss, lr, grad norm, consumed rows, consumed tokens) of each step."""
    mlflow: tuple[Any, ...]
    """(status of each run, and per metric the steps logged)."""


def result_of(scene: Scene) -> Result:
    """The committed result in the scene's store, and what MLflow shows of it. Verified on the way."""
    from storage.artifact import list_records, verify_record
    from tasks.track import EXPERIMENT, identity
    from twinkle_core.tracking.mlflow import client

    context = scene.context()
    store = open_store(context.settings.store_url)
    (record,) = list_records(store, "train")
    assert verify_record(store, record) == []
    rows = [json.loads(line) for line in store.get(f"{record.prefix}/history.jsonl").splitlines()]
    names = ("step", "loss", "lr", "grad_norm", "consumed_train_samples", "consumed_train_tokens")
    api = client(identity(context, record.key).uri)
    runs = api.search_runs([api.get_experiment_by_name(EXPERIMENT).experiment_id])
    shown = [
        (run.info.status, {n: [(p.step, p.value) for p in api.get_metric_history(run.info.run_id, n)] for n in names[1:]}) for run in runs
    ]
    return Result(
        digest=record.digest,
        files={entry.path: entry.sha256 for entry in record.files if not entry.volatile},
        curve=tuple(tuple(row[name] for name in names) for row in rows),
        mlflow=tuple(shown),
    )
