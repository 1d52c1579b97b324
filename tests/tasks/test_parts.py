"""Finished files of a killed computation are found and believed when they are whole; what nobody finished goes in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3.session
import pytest

from storage import layout
from storage.artifact import ArtifactRecord, SourceRef, read_record, verify_record
from storage.lease import Holder, acquire
from storage.store import Store, open_store
from storage.transfer import upload_folder
from tasks.context import Context, RunSpec
from tasks.parts import MAX_WAITING, StoredParts
from tasks.settings import Settings
from tasks.step import Produced, Stage, StepResult, Wanted, run_step
from tests.servers import create_bucket, s3_server
from twinkle_cli.collect import HOUR, collect
from twinkle_core.errors import NotFoundError, StorageError

STAGE = Stage(name="toy", version=1, modules=())
WANTED = Wanted(stage=STAGE, recipe={}, inputs={"rows": SourceRef(name="rows", uri="x", digest="d")})
NAMES = [f"part-{number}" for number in range(6)]


def context_in(home: Path) -> Context:
    return Context(settings=Settings.from_env({"TWINKLE_HOME": str(home)}), spec=RunSpec(run_id="run-1", flow="sft", params={}, code={}))


class Killed(BaseException):
    """Stands for a SIGKILL: nothing handles it."""


def run(context: Context, made: list[str], die_at: str | None = None) -> StepResult:
    """Makes the parts that are not there yet."""

    def compute(key: str, work: Path) -> Produced:
        total = 0
        with StoredParts(context.store, STAGE.name, key) as parts:
            for name in NAMES:
                facts = parts.finished(name)
                if facts is None:
                    if name == die_at:
                        while parts._uploads:
                            parts._collect()
                        raise Killed
                    made.append(name)
                    (work / name).write_bytes(name.encode() * 100)
                    facts = {"size": len(name)}
                    parts.add(work / name, facts)
                total += facts["size"]
            (work / "report.json").write_text(str(total))
            return Produced(stored=parts.stored(work))

    return run_step(context, WANTED, compute=compute, say=lambda _: None)


def markers(context: Context) -> list[str]:
    return [info.key for info in context.store.list("data") if ".parts/" in info.key]


def test_a_killed_computation_goes_on_after_the_last_finished_part(tmp_path: Path) -> None:
    context, whole = context_in(tmp_path / "killed"), context_in(tmp_path / "whole")
    made: list[str] = []
    with pytest.raises(Killed):
        run(context, made, die_at="part-4")
    assert made == NAMES[:4]
    assert read_record(context.store, STAGE.name, WANTED.key) is None
    result = run(context, made)
    assert made == NAMES, "each part was made once"
    assert result.ref.digest == run(whole, []).ref.digest
    assert verify_record(context.store, result.record) == []
    assert [entry.path for entry in result.record.files] == [*NAMES, "report.json"]
    stored = [info.key for info in context.store.list(result.record.prefix)]
    assert stored == [f"{result.record.prefix}/{name}" for name in [*NAMES, "report.json"]], "markers are no part of the artifact"


@pytest.mark.parametrize("damage", ["missing", "short", "changed", "marker", "other marker"])
def test_a_part_that_is_not_whole_is_made_again(tmp_path: Path, damage: str) -> None:
    context = context_in(tmp_path)
    with pytest.raises(Killed):
        run(context, [], die_at="part-4")
    marker = next(key for key in markers(context) if key.endswith("part-2.json"))
    part = marker.replace(".parts/", "/").removesuffix(".json")
    if damage == "missing":
        context.store.delete(part)
    elif "marker" in damage:
        context.store.put(marker, context.store.get(marker.replace("part-2", "part-1"))[: None if damage == "other marker" else 30])
    else:
        context.store.put(part, context.store.get(part)[:-1] + (b"" if damage == "short" else b"?"))
    made: list[str] = []
    result = run(context, made)
    assert made == ["part-2", "part-4", "part-5"]
    assert verify_record(context.store, result.record) == []


def test_a_damaged_artifact_is_made_again_elsewhere_and_that_too_can_be_resumed(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    first = run(context, [])
    damaged = f"{first.record.prefix}/part-3"
    context.store.put(damaged, b"?")
    made: list[str] = []
    with pytest.raises(Killed):
        run(context, made, die_at="part-4")
    assert made == NAMES[:4], "no part of the damaged artifact is believed"
    assert context.store.get(damaged) == b"?", "nothing is written into it"
    second = run(context, made)
    assert made == NAMES
    assert second.record.attempt != first.record.attempt
    assert second.ref.digest == first.ref.digest
    assert run(context, made).reused


def test_an_unreadable_record_may_name_any_attempt(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    first = run(context, [])
    context.store.put(layout.record_key(STAGE.name, WANTED.key), b"{")
    made: list[str] = []
    second = run(context, made)
    assert made == NAMES
    assert second.record.attempt != first.record.attempt


def gc(context: Context, later_hours: float) -> None:
    now = time.time() + later_hours * HOUR
    collect(context.settings.store_url, keep_last=5, min_age_hours=24, dry_run=False, now=now, say=lambda _: None)


def test_gc_takes_what_nobody_finished_and_leaves_what_is_alive(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    with pytest.raises(Killed):
        run(context, [], die_at="part-4")
    gc(context, later_hours=0)
    assert len(markers(context)) == 4
    lease = acquire(context.store, layout.lease_key(STAGE.name, WANTED.key), Holder.here(), ttl_seconds=1e6)
    assert lease is not None
    with lease:
        gc(context, later_hours=200)
    assert len(markers(context)) == 4, "somebody computes it"
    gc(context, later_hours=15 * 24)  # by then the run that wanted it counts as abandoned
    assert context.store.list("data") == []


def test_gc_takes_the_markers_of_a_finished_artifact_and_no_file_of_it(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    result = run(context, [])
    gc(context, later_hours=0)
    assert len(markers(context)) == len(NAMES)
    gc(context, later_hours=25)
    assert markers(context) == []
    assert verify_record(context.store, result.record) == []


def test_gc_leaves_old_parts_to_the_recomputation_of_a_damaged_artifact(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    first = run(context, [])
    context.store.put(f"{first.record.prefix}/part-3", b"?")
    with pytest.raises(Killed):
        run(context, [], die_at="part-4")
    lease = acquire(context.store, layout.lease_key(STAGE.name, WANTED.key), Holder.here(), ttl_seconds=1e6)
    assert lease is not None
    with lease:
        gc(context, later_hours=48)
    made: list[str] = []
    run(context, made)
    assert made == NAMES[4:]


class Full(Exception):
    """The disk is full, say."""


def test_a_failed_upload_is_raised_and_few_files_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "store"))

    def fail(path: Path, key: str) -> None:
        raise Full(key)

    monkeypatch.setattr(store, "upload", fail)
    for number in range(MAX_WAITING + 1):
        (tmp_path / f"{number}").write_text("x")
    with pytest.raises(Full), StoredParts(store, "toy", "k") as parts:
        [parts.add(tmp_path / f"{number}", {}) for number in range(MAX_WAITING + 1)]
    monkeypatch.undo()
    assert store.list("data") == [], "no marker without its file"


def test_the_files_of_a_folder_are_uploaded_beside_each_other_and_listed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = open_store(str(tmp_path / "store")), tmp_path / "folder"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(name)
    upload, at_once, most = store.upload, 0, 0

    def slow(path: Path, key: str) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        upload(path, key)
        at_once -= 1

    monkeypatch.setattr(store, "upload", slow)
    assert [entry.path for entry in upload_folder(store, folder, "data/toy/k/a")] == NAMES
    assert most > 1


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Any]]:
    """A store in a bucket, and a client of that bucket's server."""
    with s3_server() as environment:
        create_bucket(environment, "parts")
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        yield open_store("s3://parts/deep"), boto3.session.Session().client("s3")


@pytest.mark.slow
def test_unfinished_multipart_uploads_are_aborted_when_they_are_old(s3: tuple[Store, Any], tmp_path: Path) -> None:
    store, client = s3
    for key in ("deep/data/toy/k/a/part-0", "elsewhere/part-0"):
        upload = client.create_multipart_upload(Bucket="parts", Key=key)
        client.upload_part(Bucket="parts", Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"half")
    begun = client.list_multipart_uploads(Bucket="parts")["Uploads"][0]["Initiated"].timestamp()  # moto: always the same day in 2010
    assert store.sweep(begun - HOUR) == 0
    assert store.sweep(begun + HOUR) == 1
    assert [upload["Key"] for upload in client.list_multipart_uploads(Bucket="parts")["Uploads"]] == ["elsewhere/part-0"]
    large = tmp_path / "large"
    large.write_bytes(bytes(20 << 20))  # above the size from which boto3 sends parts
    store.upload(large, "data/toy/k/a/large")
    assert store.size("data/toy/k/a/large") == 20 << 20
    assert store.sweep(time.time() + HOUR) == 0


@pytest.mark.slow
def test_a_multipart_upload_that_fails_leaves_nothing(s3: tuple[Store, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, client = s3
    large = tmp_path / "large"
    large.write_bytes(bytes(20 << 20))
    sent = 0

    def fail_the_second(**arguments: Any) -> None:
        nonlocal sent
        sent += arguments["model"].name == "UploadPart"
        if sent == 2:
            raise OSError("the file cannot be read any more")

    store._client.meta.events.register("before-call.s3.UploadPart", fail_the_second)  # type: ignore[attr-defined]
    with pytest.raises((OSError, StorageError)):
        store.upload(large, "data/toy/k/a/large")
    with pytest.raises(NotFoundError):
        store.get("data/toy/k/a/large")
    assert sent >= 2
    assert "Uploads" not in client.list_multipart_uploads(Bucket="parts")


def test_records_name_the_attempt_of_the_parts(tmp_path: Path) -> None:
    context = context_in(tmp_path)
    made: ArtifactRecord = run(context, []).record
    assert all(key.startswith(f"{made.prefix}.parts/") for key in markers(context))
