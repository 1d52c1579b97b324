"""SIGKILL of the driver at any event: the result is that of an undisturbed run, to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.chaos.harness import Ending, Kill, Result, Scene, result_of, run_victim, start_victim

Fresh = Callable[[str], Scene]


def check_kills(fresh: Fresh, undisturbed: tuple[Result, Ending], seed: int) -> int:
    """Kills one training up to three times, lets it end, and compares; the number of kills that happened."""
    expected, whole = undisturbed
    rng = random.Random(seed)
    scene = fresh(f"kill-{seed}")
    num_kills = 0
    for _ in range(rng.choice([1, 1, 2, 3])):
        ending = run_victim(scene, Kill(event=rng.randint(1, whole.num_events), before=rng.random() < 0.5))
        num_kills += ending.exitcode == -signal.SIGKILL
    if num_kills:
        assert run_victim(scene).exitcode == 0
    assert result_of(scene) == expected, f"seed {seed}"
    return num_kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_training_ends_as_if_nothing_had_happened(fresh: Fresh, undisturbed: tuple[Result, Ending], seed: int) -> None:
    assert check_kills(fresh, undisturbed, seed) > 0


@pytest.mark.slow
def test_the_scene_has_what_the_law_speaks_of(undisturbed: tuple[Result, Ending]) -> None:
    result, ending = undisturbed
    assert ending.num_events > 40
    assert [row[0] for row in result.curve] == [1, 2, 3, 4, 5]
    assert [row[4] for row in result.curve] == [4, 8, 12, 16, 18]
    assert {"adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors", "training.json"} <= set(result.files)
    ((status, metrics),) = result.mlflow
    assert status == "FINISHED"
    assert [step for step, _ in metrics["loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in metrics["loss"]] == [row[1] for row in result.curve]


@pytest.mark.slow
def test_a_paused_attempt_that_wakes_after_a_newer_one_commits_nothing(fresh: Fresh, undisturbed: tuple[Result, Ending]) -> None:
    scene = fresh("zombie")
    process, _ = start_victim(scene)
    head = scene.home / "store"
    deadline = time.monotonic() + 60
    while not any(json.loads(path.read_bytes())["checkpoints"] for path in head.glob("checkpoints/*/HEAD.json")):
        assert time.monotonic() < deadline, "no checkpoint was committed"
        time.sleep(0.002)
    time.sleep(0.02)  # not inside the swap itself: that is held for microseconds
    os.kill(process.pid, signal.SIGSTOP)
    try:
        _let_the_lease_run_out(scene)
        assert run_victim(scene).exitcode == 0
        before = {path: path.stat().st_mtime_ns for path in head.rglob("*") if path.is_file() and "data/train" in str(path)}
        expected = result_of(scene)
        assert expected == undisturbed[0]
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == 1, "the zombie must fail, fenced, rather than end well"
    committed = {path for path in before if path.name == "MANIFEST.json"}
    assert set(head.rglob("MANIFEST.json")) == committed
    assert result_of(scene).digest == expected.digest


def _let_the_lease_run_out(scene: Scene) -> None:
    """Moves the stopped holder's lease into the past, as if its ttl had gone by."""
    (path,) = scene.home.glob("store/leases/train/*.json")
    info = json.loads(path.read_bytes())
    info["expires_at"] = 0.0
    path.write_text(json.dumps(info))
