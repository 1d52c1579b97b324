"""What has to hold of a training that was killed and run again, besides that its result is that of an undisturbed one."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from storage import layout
from storage.lease import read_lease
from storage.store import Store
from tests.chaos.harness import Scene
from tests.chaos.script import Script
from tests.chaos.trainings import MARK
from twinkle_cli.collect import collect
from twinkle_core.checkpoint.manifest import Manifest, read_head
from twinkle_core.checkpoint.restore import newest_valid
from twinkle_core.infra.guardian import is_alive

Journal = list[dict[str, Any]]
Seen = dict[tuple[int, int], list[int]]
"""(step, rank) -> rows, as checksums of their tokens, in the order in which they went through the model."""
SETTLE_SECONDS = 30.0


def seen(journal: Journal) -> Seen:
    """Of each step the last time that it was computed."""
    return {(line["step"], line["rank"]): line["rows"] for line in journal if line["kind"] == "saw"}


def check_rows(journal: Journal, whole: Seen, *, epochs: int, num_rows: int) -> None:
    """No row twice or never: each time that a step was computed it saw the rows that it sees in an undisturbed run."""
    assert seen(journal).keys() == whole.keys(), "other steps were computed"
    for line in journal:
        if line["kind"] == "saw":
            assert line["rows"] == whole[line["step"], line["rank"]], f"step {line['step']} of worker {line['rank']} saw other rows"
    counts = Counter(row for rows in seen(journal).values() for row in rows)
    assert len(counts) == num_rows, "rows that were never seen"
    assert set(counts.values()) == {epochs}, "rows that were seen once too often, or too seldom"


def check_nothing_again(journal: Journal) -> None:
    """A step that lies before a committed checkpoint is never computed again, and nothing once the record is there."""
    committed, recorded = 0, False
    for line in journal:
        if line["kind"] == "committed":
            committed = max(committed, line["step"])
        elif line["kind"] == "recorded":
            recorded = True
        elif line["kind"] == "saw":
            assert not recorded, f"step {line['step']} was computed although the training was finished"
            assert line["step"] > committed, f"step {line['step']} was computed again after the checkpoint of step {committed}"
        elif line["kind"] == "end":
            assert recorded, "the training ended without a record"
    assert recorded, "the training has no record"


def check_no_damage(journal: Journal) -> None:
    """A kill leaves no committed checkpoint that is not whole: none was ever passed over."""
    passed_over = [line["line"] for line in journal if line["kind"] == "say" and "is not used" in line["line"]]
    assert passed_over == [], "a damaged checkpoint was committed"


def check_store(store: Store) -> int:
    """Nobody holds a lease, all of HEAD's checkpoints are whole, and the garbage collector takes all else; how many files that was."""
    held = [info.key for info in store.list(layout.leases_prefix()) if (lease := read_lease(store, info.key)) and lease.alive()]
    assert held == [], "leases are still held"
    (head_info,) = store.list(layout.checkpoints_prefix())
    train_key = head_info.key.split("/")[1]
    head, _ = read_head(store, train_key)
    for number in range(len(head.checkpoints)):
        older = head.__class__(epoch=head.epoch, checkpoints=head.checkpoints[number:])
        found = newest_valid(store, older)
        assert found.problems == (), "a kept checkpoint is not whole"
    needed = set().union(*(_files_of(store, line.manifest) for line in head.checkpoints))
    prefix = layout.attempts_prefix("train", train_key)
    before = {info.key for info in store.list(prefix)}
    assert needed <= before, "files of kept checkpoints are missing"
    collect(store.url, keep_last=1, min_age_hours=0.0, dry_run=False, now=time.time() + 3600.0, say=lambda line: None)
    assert {info.key for info in store.list(prefix)} == needed, "the collector took too much, or not all that nobody needs"
    assert store.sweep(time.time() + 3600.0) == 0, "the collector leaves no unfinished upload"
    return len(before - needed)


def _files_of(store: Store, manifest_key: str) -> set[str]:
    manifest = Manifest.from_json(store.get(manifest_key))
    return {manifest_key, *(f"{manifest.prefix}/{entry.path}" for entry in manifest.files)}


def check_processes(script: Script) -> None:
    """Nothing that the training started lives: no driver, no worker, and nothing that a driver started besides."""
    mark = f"{MARK}={script.folder}".encode()
    known = [(line["pid"], line["started"]) for line in script.journal() if line["kind"] == "process"]
    assert known
    _until_none(lambda: [pid for pid, started in known if is_alive(pid, started)])
    _until_none(lambda: [folder.name for folder in Path("/proc").glob("[0-9]*") if mark in _read(folder / "environ").split(b"\0")])


def check_ray() -> None:
    """Every core is free again, though the cluster stays: no actor and no reservation is left."""
    import ray

    _until_none(lambda: [] if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"] else [ray.available_resources()])


def _until_none(find: Any) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := find():
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""


def check_all(scene: Scene, script: Script, whole: Seen, *, num_rows: int, on_ray: bool) -> dict[str, int]:
    """All laws. What killed attempts left: files in the store for the garbage collector, and folders of temporary files."""
    journal = script.journal()
    check_rows(journal, whole, epochs=scene.settings.train.epochs, num_rows=num_rows)
    check_nothing_again(journal)
    check_no_damage(journal)
    check_processes(script)
    if on_ray:
        check_ray()
    temporary = [*(script.folder / "tmp").iterdir(), *(scene.home / "cache" / "scratch").iterdir()]
    return {"files left": check_store(scene.context().store), "folders left": len(temporary)}
