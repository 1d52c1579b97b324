import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.artifact import SourceRef, list_records, read_record, verify_record
from tasks.context import Context, RunSpec
from tasks.settings import Settings
from tasks.step import Produced, Stage, StepResult, Wanted, explain, run_step
from twinkle_core.errors import StorageError

STAGE = Stage(name="toy", version=1, modules=())


def context_in(home: Path) -> Context:
    return Context(settings=Settings.from_env({"TWINKLE_HOME": str(home)}), spec=RunSpec(run_id="run-1", flow="sft", params={}, code={}))


def wanted(lr: float = 1.0, digest: str = "d1", version: int = 1) -> Wanted:
    stage = Stage(name="toy", version=version, modules=())
    return Wanted(stage=stage, recipe={"train": {"lr": lr, "epochs": 2}}, inputs={"rows": SourceRef(name="rows", uri="x", digest=digest)})


def run(context: Context, want: Wanted, made: list[str] | None = None, says: list[str] | None = None) -> StepResult:
    def compute(key: str, work: Path) -> Produced:
        (work / "a.txt").write_text("first")
        (work / "b.txt").write_text("second")
        (work / "clock.txt").write_text(str(time.time()))
        if made is not None:
            made.append(key)
        return Produced(summary={"headline": "two files"}, volatile=("clock.txt",))

    return run_step(context, want, compute=compute, say=(says if says is not None else []).append)


def test_the_same_wish_is_computed_once(tmp_path: Path) -> None:
    context, made = context_in(tmp_path), []
    first, second = run(context, wanted(), made), run(context, wanted(), made)
    assert (first.reused, second.reused, len(made)) == (False, True, 1)
    assert second.ref == first.ref
    assert "made by run run-1" in second.reason


@pytest.mark.parametrize("other", [wanted(lr=2.0), wanted(digest="d2"), wanted(version=2)])
def test_another_recipe_input_or_version_is_another_artifact(tmp_path: Path, other: Wanted) -> None:
    context, made = context_in(tmp_path), []
    first, second = run(context, wanted(), made), run(context, other, made)
    assert len(made) == 2
    assert first.ref.key != second.ref.key
    assert first.ref.digest == second.ref.digest, "the same bytes: what follows is reused"


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_a_damaged_file_is_named_and_the_artifact_recomputed(tmp_path: Path, damage: str) -> None:
    context, made, says = context_in(tmp_path), [], []
    first = run(context, wanted(), made)
    key = f"{first.record.prefix}/b.txt"
    if damage == "missing":
        context.store.delete(key)
    else:
        context.store.put(key, b"sec" if damage == "truncated" else b"Second")
    again = run(context, wanted(), made, says)
    assert not again.reused
    assert len(made) == 2
    assert "b.txt" in again.reason
    assert any("b.txt" in line for line in says)
    assert again.ref.digest == first.ref.digest
    assert again.record.attempt != first.record.attempt
    assert verify_record(context.store, again.record) == []


def test_an_unreadable_record_is_replaced(tmp_path: Path) -> None:
    context, made = context_in(tmp_path), []
    first = run(context, wanted(), made)
    context.store.put(f"records/toy/{first.ref.key}.json", b'{"half')
    again = run(context, wanted(), made)
    assert (again.reused, len(made)) == (False, 2)
    assert read_record(context.store, "toy", first.ref.key) == again.record


def test_a_computation_that_fails_leaves_no_record_and_no_scratch(tmp_path: Path) -> None:
    context = context_in(tmp_path)

    def compute(_key: str, work: Path) -> Produced:
        (work / "half.txt").write_text("half")
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        run_step(context, wanted(), compute=compute, say=[].append)
    assert list(list_records(context.store)) == []
    assert list(context.scratch.iterdir()) == []
    assert not run(context, wanted()).reused, "the lease was given back"


def test_the_reason_is_the_difference_to_the_nearest_artifact(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    assert explain(context, wanted()) == "no toy artifact exists yet"
    far, near = run(context, wanted(lr=5.0, digest="other")), run(context, wanted(lr=2.0))
    reason = explain(context, wanted(lr=3.0))
    assert reason == f"nearest is {near.ref.key[:12]}, differing in train.lr: 2.0 → 3.0"
    assert far.ref.key[:12] not in reason


def test_two_at_once_compute_once_and_share(tmp_path: Path) -> None:
    processes = [_spawn(_slow_step, tmp_path, 1.0) for _ in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len((tmp_path / "made.txt").read_text().splitlines()) == 1


def test_when_the_one_that_computes_is_killed_the_waiting_one_takes_over(tmp_path: Path) -> None:
    first = _spawn(_slow_step, tmp_path, 600.0)
    _until(lambda: (tmp_path / "made.txt").exists())
    second = _spawn(_slow_step, tmp_path, 0.0)
    time.sleep(1.5)
    assert second.is_alive(), "the second waits while the first is alive"
    os.kill(first.pid, signal.SIGKILL)
    first.join(10)
    second.join(60)
    assert second.exitcode == 0
    assert len((tmp_path / "made.txt").read_text().splitlines()) == 2
    assert len(list(list_records(context_in(tmp_path).store))) == 1


def _slow_step(home: Path, seconds: float) -> None:
    def compute(key: str, work: Path) -> Produced:
        with (home / "made.txt").open("a") as file:
            file.write(key + "\n")
        time.sleep(seconds)
        (work / "a.txt").write_text("first")
        return Produced()

    run_step(context_in(home), wanted(), compute=compute, say=print)


def _spawn(target: Callable[..., None], *args: object) -> multiprocessing.Process:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    process.start()
    return process


def _until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_unreadable_record_of_another_key_does_not_stop_a_computation(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    context.store.put("records/toy/0000aaaa.json", b'{"half":')
    assert not run(context, wanted()).reused
