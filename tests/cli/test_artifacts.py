import json
import time
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.artifact import ArtifactRecord, ArtifactRef, FileEntry, SourceRef, artifact_key, commit_record
from storage.fingerprint import digest_bytes
from storage.lease import Holder, acquire
from storage.store import Store, open_store
from storage.transfer import upload_folder
from twinkle_cli import artifacts
from twinkle_cli.collect import ABANDONED_HOURS, HOUR, collect
from twinkle_core.checkpoint.manifest import Attempt, Head, TrainerState
from twinkle_core.checkpoint.retain import keep_policy
from twinkle_core.errors import ConfigError


class Shelf:
    """A store with artifacts whose order of making is told by a counter."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "store")
        self.store: Store = open_store(self.url)
        self._folder = folder
        self._count = 0

    def make(self, stage: str, /, attempt: str = "a1", **inputs: ArtifactRecord | SourceRef) -> ArtifactRecord:
        self._count += 1
        refs: dict[str, ArtifactRef | SourceRef] = {
            name: made.ref(self.url) if isinstance(made, ArtifactRecord) else made for name, made in inputs.items()
        }
        recipe = {"number": self._count}
        key = artifact_key(stage, 1, recipe, refs)
        work = self._folder / f"work-{self._count}"
        work.mkdir()
        (work / "data.txt").write_text(f"{stage} {self._count}")
        files = upload_folder(self.store, work, layout.data_prefix(stage, key, attempt))
        provenance: dict[str, Any] = {"created": float(self._count), "run_id": "r"}
        record = ArtifactRecord(
            stage=stage, version=1, key=key, attempt=attempt, recipe=recipe, inputs=refs, files=files, summary={}, provenance=provenance
        )
        return commit_record(self.store, record)[0]

    def leftover(self, stage: str, key: str, attempt: str) -> str:
        name = f"{layout.data_prefix(stage, key, attempt)}/part.bin"
        self.store.put(name, b"12345")
        return name

    def collect(self, keep_last: int, *, later_hours: float = 0, min_age_hours: float = 24, dry_run: bool = False) -> list[str]:
        said: list[str] = []
        now = time.time() + later_hours * HOUR
        collect(self.url, keep_last=keep_last, min_age_hours=min_age_hours, dry_run=dry_run, now=now, say=said.append)
        return said

    def there(self, *records: ArtifactRecord) -> list[bool]:
        found = []
        for record in records:
            has_record = self.store.exists(layout.record_key(record.stage, record.key))
            assert has_record == self.store.exists(f"{record.prefix}/data.txt")
            found.append(has_record)
        return found


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def chain(shelf: Shelf) -> list[ArtifactRecord]:
    rows = shelf.make("preprocess", rows=SourceRef(name="rows", uri="rows.jsonl", digest="d" * 64))
    encoded = shelf.make("encode", trajectories=rows)
    trained = shelf.make("train", shards=encoded)
    return [rows, encoded, trained]


def test_gc_keeps_the_newest_of_each_stage_with_all_they_were_made_from(shelf: Shelf) -> None:
    old, new = chain(shelf), chain(shelf)
    branch = shelf.make("train", shards=old[1])  # the newest training comes from the older encoding
    shelf.collect(1)
    assert shelf.there(*old, *new, branch) == [True, True, False, True, True, False, True]


def test_gc_keeps_what_a_release_reaches(shelf: Shelf) -> None:
    released, other = chain(shelf), chain(shelf)
    release = shelf.make("publish", model=released[2])
    shelf.collect(0)
    assert shelf.there(*released, release) == [True] * 4
    assert shelf.there(*other) == [False] * 3


def test_gc_says_what_it_would_do_and_does_nothing_when_asked_so(shelf: Shelf) -> None:
    made = chain(shelf)
    said = shelf.collect(0, dry_run=True)
    assert shelf.there(*made) == [True] * 3
    size = sum(entry.size for record in made for entry in record.files)
    assert said[-1] == f"would delete 3 artifacts and 3 files, {size} B; kept 0 artifacts"
    assert shelf.collect(0)[-1] == f"deleted 3 artifacts and 3 files, {size} B; kept 0 artifacts"
    assert shelf.there(*made) == [False] * 3
    assert shelf.store.list(layout.all_data_prefix()) == []


def test_gc_keeps_what_a_run_in_progress_has_named_until_it_ends_or_is_abandoned(shelf: Shelf) -> None:
    used, other = chain(shelf), chain(shelf)
    shelf.store.put(layout.run_spec_key("run-1"), b"{}")
    shelf.store.put(layout.run_use_key("run-1", "encode", used[1].key), b"")
    shelf.collect(0)
    assert shelf.there(*used) == [True, True, False]
    assert shelf.there(*other) == [False] * 3
    shelf.collect(0, later_hours=ABANDONED_HOURS - 1)
    assert shelf.there(*used) == [True, True, False]
    shelf.store.put(layout.run_end_key("run-1"), b"{}")
    shelf.collect(0)
    assert shelf.there(*used) == [False] * 3


def test_gc_forgets_a_run_that_was_abandoned(shelf: Shelf) -> None:
    made = chain(shelf)
    shelf.store.put(layout.run_use_key("run-1", "encode", made[1].key), b"")
    shelf.collect(0, later_hours=ABANDONED_HOURS + 1)
    assert shelf.there(*made) == [False] * 3


def test_gc_keeps_the_files_of_a_live_computation_and_what_its_run_has_named(shelf: Shelf) -> None:
    made = chain(shelf)
    key = "e" * 64
    part = shelf.leftover("train", key, "step-000000001-e1")
    shelf.store.put(layout.head_key(key), Head(epoch=1).to_json())
    for stage, named in (("encode", made[1].key), ("train", key)):
        shelf.store.put(layout.run_use_key("run-1", stage, named), b"")
    lease = acquire(shelf.store, layout.lease_key("train", key), Holder.here())
    assert lease is not None
    with lease:
        shelf.collect(0, min_age_hours=0, later_hours=ABANDONED_HOURS + 1)  # the run's marks are too old to count, the lease is not
        assert shelf.store.exists(part)
        assert shelf.store.exists(layout.head_key(key))
        assert shelf.there(*made) == [True] * 3
        shelf.collect(0, min_age_hours=0)
        assert shelf.store.exists(part)
        assert shelf.there(*made) == [True, True, False]
    shelf.store.put(layout.run_end_key("run-1"), b"{}")
    shelf.collect(0, min_age_hours=0, later_hours=1)
    assert not shelf.store.exists(part)
    assert not shelf.store.exists(layout.head_key(key))
    assert shelf.there(*made) == [False] * 3


def test_gc_deletes_no_finished_artifact_while_a_computation_does_not_say_what_it_reads(shelf: Shelf) -> None:
    made = chain(shelf)
    lease = acquire(shelf.store, layout.lease_key("export", "f" * 64), Holder.here())
    assert lease is not None
    with lease:
        said = shelf.collect(0)
        assert shelf.there(*made) == [True] * 3
        assert any("does not say what it reads" in line for line in said)
    shelf.collect(0)
    assert shelf.there(*made) == [False] * 3


def test_gc_deletes_unfinished_work_only_when_it_is_old(shelf: Shelf) -> None:
    (made,) = chain(shelf)[2:]
    other_attempt = shelf.leftover("encode", chain(shelf)[1].key, "dead")
    no_record = shelf.leftover("pack", "c" * 64, "dead")
    shelf.collect(9)
    assert all(shelf.store.exists(name) for name in (other_attempt, no_record))
    shelf.collect(9, later_hours=25)
    assert not shelf.store.exists(other_attempt)
    assert not shelf.store.exists(no_record)
    assert shelf.there(made) == [True]


def test_gc_keeps_what_it_cannot_read(shelf: Shelf) -> None:
    made = chain(shelf)
    shelf.store.put(layout.record_key("encode", made[1].key), b"not json")
    said = shelf.collect(0, later_hours=1000)
    assert shelf.store.exists(f"{made[1].prefix}/data.txt")
    assert any("kept, although unreadable" in line for line in said)


def test_gc_deletes_no_finished_artifact_while_a_record_cannot_be_read(shelf: Shelf) -> None:
    released = chain(shelf)
    release = shelf.make("publish", model=released[2])
    shelf.store.put(layout.record_key("publish", release.key), b"not json")
    said = shelf.collect(0, later_hours=1000)
    assert shelf.there(*released) == [True] * 3, "the release may be made of them"
    assert any("cannot be read" in line for line in said)


def test_gc_deletes_checkpoints_that_no_head_names_and_keeps_those_that_one_does(shelf: Shelf) -> None:
    trained = chain(shelf)[2]
    attempt = Attempt.begin(shelf.store, trained.key)
    files = []
    for step in (2, 4):
        shelf.store.put(f"{attempt.prefix(step)}/w.bin", b"w")
        files.append(f"{attempt.prefix(step)}/w.bin")
        entry = FileEntry(path="w.bin", size=1, sha256=digest_bytes(b"w"))
        attempt.commit(step=step, files=(entry,), state=TrainerState(cur_step=step), keep=keep_policy(keep_last=5))
    orphan = shelf.leftover("train", trained.key, "step-000000006-e1")
    shelf.collect(5)
    assert shelf.store.exists(orphan), "it may still be written"
    shelf.collect(5, later_hours=25)
    assert not shelf.store.exists(orphan)
    assert [shelf.store.exists(name) for name in files] == [True, True]
    assert shelf.there(trained) == [True]


def test_gc_keeps_all_of_a_training_whose_head_is_broken(shelf: Shelf) -> None:
    trained = chain(shelf)[2]
    checkpoint = shelf.leftover("train", trained.key, "step-000000002-e1")
    shelf.store.put(layout.head_key(trained.key), b"{}")
    shelf.collect(0, later_hours=1000)
    assert shelf.store.exists(checkpoint)
    assert shelf.there(trained) == [True]


@pytest.mark.parametrize("was_committed", [True, False])
def test_gc_keeps_the_checkpoints_of_a_training_whose_head_is_gone(shelf: Shelf, was_committed: bool) -> None:
    """The training rebuilds its head from them. Without a manifest nothing was ever committed."""
    checkpoint = shelf.leftover("train", "f" * 64, "step-000000002-e1")
    if was_committed:
        shelf.store.put(layout.checkpoint_manifest_key(layout.checkpoint_prefix("f" * 64, 2, 1)), b"{}")
    shelf.collect(0, later_hours=1000)
    assert shelf.store.exists(checkpoint) == was_committed


def test_gc_that_is_cut_off_leaves_the_head_of_what_is_left(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the rest would be taken for a training to be rebuilt, and kept for ever."""
    key = "f" * 64
    manifest = layout.checkpoint_manifest_key(layout.checkpoint_prefix(key, 2, 1))
    shelf.store.put(manifest, b"{}")
    shelf.store.put(layout.head_key(key), Head(epoch=1).to_json())
    real = type(shelf.store).delete

    def cut_off(self: Store, name: str) -> None:
        real(self, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(shelf.store), "delete", cut_off)
    with pytest.raises(KeyboardInterrupt):
        shelf.collect(0, later_hours=1000)
    monkeypatch.undo()
    assert shelf.store.exists(layout.head_key(key))
    shelf.collect(0, later_hours=1000)
    assert not shelf.store.exists(layout.head_key(key)) and not shelf.store.exists(manifest)


def test_gc_sweeps_what_a_killed_upload_left(shelf: Shelf) -> None:
    chain(shelf)
    left = Path(shelf.url) / ".tmp" / "deadbeef"
    left.write_bytes(b"half")
    shelf.collect(5)
    assert left.exists()
    shelf.collect(5, later_hours=25)
    assert not left.exists()


def test_a_key_is_found_by_its_first_letters(shelf: Shelf) -> None:
    made = chain(shelf)
    for record in made:
        assert artifacts.find(made, record.key[:12]) == record
        assert artifacts.find(made, f"{record.stage}/{record.key[:4]}") == record
    with pytest.raises(ConfigError, match="begins several keys"):
        artifacts.find(made, "")
    with pytest.raises(ConfigError, match="no artifact's key begins with 'xyz'"):
        artifacts.find(made, "xyz")


def test_list_show_and_lineage_tell_what_is_there(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    made = chain(shelf)
    artifacts.show_list(shelf.url, None)
    listed = capsys.readouterr().out
    assert all(record.key[:12] in listed for record in made)
    artifacts.show_list(shelf.url, "train")
    listed = capsys.readouterr().out
    assert [record.key[:12] in listed for record in made] == [False, False, True]
    artifacts.show_record(shelf.url, made[1].key[:12])
    assert ArtifactRecord.from_json(json.loads(capsys.readouterr().out)) == made[1]
    artifacts.show_lineage(shelf.url, made[2].key[:12])
    lines = capsys.readouterr().out.splitlines()
    assert [next(i for i, line in enumerate(lines) if record.key[:12] in line) for record in made] == [2, 1, 0]
    assert "d" * 64 in lines[3]


def test_verify_names_a_changed_a_short_and_a_missing_file_and_an_unreadable_record(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    made = chain(shelf) + chain(shelf)
    assert artifacts.verify(shelf.url, None) == 0
    assert "6 artifacts read, 0 problems" in capsys.readouterr().out
    data = shelf.store.get(f"{made[0].prefix}/data.txt")
    shelf.store.put(f"{made[0].prefix}/data.txt", b"X" + data[1:])
    shelf.store.put(f"{made[1].prefix}/data.txt", b"")
    shelf.store.delete(f"{made[2].prefix}/data.txt")
    shelf.store.put(layout.record_key("encode", made[4].key), b"{")
    assert artifacts.verify(shelf.url, None) == 1
    out = capsys.readouterr().out
    assert "5 artifacts read, 4 problems" in out
    for record in (made[0], made[1], made[2], made[4]):
        assert record.key[:12] in out
    assert artifacts.verify(shelf.url, made[3].key[:12]) == 0
    assert artifacts.verify(shelf.url, made[2].key[:12]) == 1


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB"), (3e12, "3.0 TB")])
def test_sizes_are_told_in_units(num_bytes: float, text: str) -> None:
    assert artifacts.size_text(num_bytes) == text
