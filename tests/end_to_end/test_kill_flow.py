"""SIGKILL of a whole `twinkle run` at and after a seeded stage's record: run again, it ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from storage.artifact import list_records, verify_record
from storage.store import Store, open_store
from tasks.track import EXPERIMENT
from tests.architecture.sources import ROOT
from tests.end_to_end.conftest import computed, in_home, run_flow, values
from twinkle_core.tracking.mlflow import KEY_TAG, STORE_TAG, client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
COMMAND = [sys.executable, "-c", "from twinkle_cli.main import main; main()", "run", "sft"]
NUM_RECORDS = 10
"""Of a whole run: one a stage, two of evaluate."""
POLL_SECONDS = 0.002


@contextmanager
def running(recipe: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`twinkle run sft RECIPE` as a process; killed at the end if it has not ended."""
    settings = {"TWINKLE_HOME": str(home), "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db", "PYTHONPATH": str(ROOT)}
    home.mkdir()
    with (home / "output.txt").open("wb") as output:
        process = subprocess.Popen([*COMMAND, str(recipe)], env={**os.environ, **settings}, cwd=home, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def wait_for_records(process: subprocess.Popen[bytes], home: Path, number: int) -> None:
    """Returns as soon as `number` records stand."""
    deadline = time.monotonic() + 120
    while len(list(home.glob("store/records/*/*"))) < number:
        assert process.poll() is None, (home / "output.txt").read_text()
        assert time.monotonic() < deadline, f"no {number} records after two minutes"
        time.sleep(POLL_SECONDS)


def digests(store: Store) -> dict[str, tuple[str, str]]:
    """(stage, content digest) by key."""
    return {record.key: (record.stage, record.digest) for record in list_records(store)}


@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_between_stages_ends_as_if_nothing_had_happened(
    finished: tuple[Path, dict[str, str]], rows: Path, tiny_llama: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    number = 3 * seed + rng.randint(1, 3)  # each seed in another third: data stages, evaluation and training, the rest
    pause_seconds = rng.choice([0.0, rng.random() * 0.3])  # at the record, or somewhere in the stage after it
    settings: dict[str, Any] = values(rows, tiny_llama)
    home, recipe = tmp_path / "home", tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    with running(recipe, home) as process:
        wait_for_records(process, home, number)
        time.sleep(pause_seconds)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL, "it was killed while it ran"

    store = open_store(str(home / "store"))
    standing = list(list_records(store))
    assert number <= len(standing) < NUM_RECORDS
    assert [problem for record in standing for problem in verify_record(store, record)] == [], "what has a record is whole"

    with in_home(home):
        release = Path(run_flow(settings)["release"])
    undisturbed, whole = open_store(str(finished[0] / "store")), digests(store)
    assert len(whole) == NUM_RECORDS
    assert whole == digests(undisturbed)
    attempts = {record.key: record.attempt for record in list_records(store)}
    assert all(attempts[record.key] == record.attempt for record in standing), "what stood was reused"
    other = Path(finished[1]["release"])
    assert release.name == other.name
    assert (release / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert computed(home, settings) == []


def test_the_next_run_of_anything_ends_what_died_before_it_in_mlflow(copy_of: Callable[[], Path], rows: Path, tiny_llama: Path) -> None:
    home = copy_of()
    api = client(f"sqlite:///{home}/mlflow.db")
    experiment = api.get_experiment_by_name(EXPERIMENT)
    dead = api.create_run(
        experiment.experiment_id, tags={KEY_TAG: "0" * 64, STORE_TAG: open_store(str(home / "store")).identity()}
    ).info.run_id
    assert api.get_run(dead).info.status == "RUNNING"
    with in_home(home):
        run_flow(values(rows, tiny_llama))
    deadline = time.monotonic() + 60
    while api.get_run(dead).info.status == "RUNNING":
        assert time.monotonic() < deadline, "it still says RUNNING a minute after the next run"
        time.sleep(0.1)
    statuses = [run.info.status for run in api.search_runs([experiment.experiment_id])]
    assert sorted(statuses) == ["FINISHED", "KILLED"]
