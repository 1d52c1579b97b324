"""SIGKILL of a Ray worker: the loop recovers inside the task, and the result is that of an undisturbed run, to the bit."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from storage.store import open_store
from tasks.train_sft import train
from tests.chaos.harness import Ending, Kill, Result, Scene, result_of, run_victim
from twinkle_core.config import ResourcesConfig

Fresh = Callable[[str], Scene]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class KillsWorker:
    """A progress that kills one of this process's Ray workers when a step is reached, once."""

    def __init__(self, at_step: int) -> None:
        self.at_step, self.killed = at_step, 0

    def start(self, description: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        if facts.get("step") == self.at_step and not self.killed:
            workers = ray_workers()
            assert workers, "no Ray worker found"
            os.kill(workers[-1], signal.SIGKILL)
            self.killed = workers[-1]


def on_ray(scene: Scene, workers: int) -> Scene:
    return replace(scene, settings=replace(scene.settings, resources=ResourcesConfig(mode="ray", workers=workers)))


@pytest.mark.parametrize("at_step", [1, 4])
def test_the_loop_survives_the_death_of_its_worker(fresh: Fresh, undisturbed: tuple[Result, Ending], at_step: int) -> None:
    scene, says, progress = on_ray(fresh("ray"), 1), [], KillsWorker(at_step)
    train(scene.context(), scene.settings, scene.shards, progress=progress, say=says.append)
    assert progress.killed
    assert any("Rebuilding the worker group (1 of 3)" in line for line in says)
    assert result_of(scene) == undisturbed[0], "one worker on Ray computes what one worker in this process does"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_workers_goes_on_in_the_same_order(
    fresh: Fresh, undisturbed: tuple[Result, Ending], before: int, after: int
) -> None:
    expected, _ = undisturbed
    scene = fresh(f"{before}-to-{after}")
    with pytest.raises(Stop):
        train(on_ray(scene, before).context(), on_ray(scene, before).settings, scene.shards, progress=StopsAfter(4), say=[].append)
    assert not list(open_store(scene.context().settings.store_url).list("records/train"))
    says: list[str] = []
    train(on_ray(scene, after).context(), on_ray(scene, after).settings, scene.shards, progress=StopsAfter(99), say=says.append)
    assert any("resuming after step" in line for line in says)
    result = result_of(scene)
    for mine, theirs in zip(result.curve, expected.curve, strict=True):
        assert (mine[0], mine[2], *mine[4:]) == (theirs[0], theirs[2], *theirs[4:]), "steps, rates, rows and tokens are the same"
        assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-4)


class Stop(Exception):
    """Ends a training from its progress."""


class StopsAfter:
    def __init__(self, step: int) -> None:
        self.step = step

    def start(self, description: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        if facts.get("step") == self.step:
            raise Stop


def test_a_driver_killed_on_ray_is_resumed_in_process(fresh: Fresh, undisturbed: tuple[Result, Ending]) -> None:
    scene = fresh("ray-driver")
    assert run_victim(on_ray(scene, 1), Kill(event=40, before=True), timeout_seconds=200).exitcode == -signal.SIGKILL
    assert run_victim(scene).exitcode == 0
    assert result_of(scene) == undisturbed[0]


def ray_workers() -> list[int]:
    """Pids of the workers that descend from this process, oldest first."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            names[int(path.parent.name)] = (path.parent / "cmdline").read_bytes().split(b"\0")[0].decode()
        except (OSError, IndexError):
            continue
        parents[int(path.parent.name)] = int(fields[1])

    def descends(pid: int) -> bool:
        while pid in parents:
            if pid == os.getpid():
                return True
            pid = parents[pid]
        return False

    return sorted(pid for pid, name in names.items() if name.startswith("ray::WorkerHost") and descends(pid))
