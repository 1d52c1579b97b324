"""The train stage in a child process that is killed and run again until it ends, by the script of the training."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tests.chaos.harness import Scene
from tests.chaos.script import Script, Trigger
from twinkle_core.types import NoProgress

ARMED_WORKER = "tests.chaos.armed_worker:ArmedWorker"
PRELOADED = ["torch", "transformers", "peft", "mlflow", "ray", "prefect", "tests.chaos.armed_worker", "tests.chaos.trainings"]
VICTIM_SECONDS = 900.0
MODEL_EVENTS = ("forward_backward", "clip_grad_and_step", "begin_save", "end_save", "restore_from")
STORE_EVENTS = ("put", "put_if_absent", "compare_and_swap", "delete")
MARK = "TWINKLE_CHAOS"
"""Is set in the environment of everything that a victim starts."""
WORKERS = "TWINKLE_CHAOS_WORKERS"
"""In a scene's environment: what starts its Ray workers (see `worker_server`)."""


def run_to_the_end(scene: Scene, script: Script) -> int:
    """Starts the driver until it ends by itself; how often it was started."""
    for starts in range(1, len(script.plan()) + 2):
        code = run_once(scene, script)
        if code == 0:
            return starts
        assert code == -signal.SIGKILL, f"the driver ended with {code}: {script.journal()[-1]}"
    raise AssertionError("the driver was killed more often than planned")


def run_once(scene: Scene, script: Script) -> int:
    """The driver's exit code: 0, or minus the signal that killed it."""
    (script.folder / "tmp").mkdir(exist_ok=True)
    spawner = multiprocessing.get_context("forkserver")
    spawner.set_forkserver_preload(PRELOADED)
    process = spawner.Process(target=_drive, args=(scene, script))
    process.start()
    process.join(VICTIM_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"the driver did not end in {VICTIM_SECONDS:g} s; its last lines: {script.journal()[-5:]}")
    return process.exitcode


def _drive(scene: Scene, script: Script) -> None:
    os.environ.update({**scene.environment, MARK: str(script.folder)})
    tempfile.tempdir = str(script.folder / "tmp")
    script.note("start")
    try:
        _install(script)
        from tasks.train_sft import train

        say: Callable[[str], None] = lambda line: script.note("say", line=line)  # noqa: E731
        result = train(scene.context(), scene.settings, scene.shards, progress=NoProgress(), say=say)
        script.note("end", reused=result.reused)
    except BaseException:
        script.note("failed", error=traceback.format_exc())
        raise


def _install(script: Script) -> None:
    """The driver's events, notes of what it commits, and workers that are armed."""
    from storage.local import FileStore
    from storage.s3 import S3Store
    from twinkle_core.model.transformers import TransformersModel
    from twinkle_core.trainer import run

    trigger = Trigger(script, outlives_kills=True)
    for store in (FileStore, S3Store):
        for name in ("put_if_absent", "compare_and_swap"):
            setattr(store, name, _noting_commits(script, getattr(store, name)))
        for name in STORE_EVENTS:
            trigger.patch("driver", store, name)
    for name in MODEL_EVENTS:
        trigger.patch("driver", TransformersModel, name)
    if WORKERS in os.environ:
        import ray

        ray.init = partial(ray.init, runtime_env={"py_executable": os.environ[WORKERS]})
    open_group = run.open_group

    def open_armed(_worker_class: object, *args: Any, **kwargs: Any) -> Any:
        group = open_group(ARMED_WORKER, *args, **kwargs)
        group.call("arm", str(script.folder))
        return group

    run.open_group = open_armed  # type: ignore[assignment]


def _noting_commits(script: Script, write: Callable[..., bool]) -> Callable[..., bool]:
    """A conditional write that notes which checkpoint HEAD names from now on, and the record of the training."""

    @wraps(write)
    def noting(store: Any, key: str, data: bytes, *rest: Any) -> bool:
        done = write(store, key, data, *rest)
        if done and key.endswith("/HEAD.json") and (lines := json.loads(data)["checkpoints"]):
            script.note("committed", step=lines[0]["step"])
        if done and key.startswith("records/train/"):
            script.note("recorded")
        return done

    return noting
