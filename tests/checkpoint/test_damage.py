"""A damaged file of the newest checkpoint: the one before is used, the file named, nothing sound deleted, the result the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from tests.checkpoint.training import KEY, Steps, Training, outcome, stop
from tests.checkpoint.training import Stop as Stopped
from twinkle_core.checkpoint.manifest import Attempt, read_head
from twinkle_core.checkpoint.restore import newest_valid
from twinkle_core.errors import DamagedError

NEWEST = f"data/train/{KEY}/step-000000005-e1"
HEAD = f"checkpoints/{KEY}/HEAD.json"
FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "rng.safetensors",
    "training.json",
    "trainer_state.json",
    "history.jsonl",
    "MANIFEST.json",
)
DAMAGES = ("missing", "flipped first", "flipped middle", "flipped last", "cut to 0", "cut to 1", "cut to half", "without the last byte")


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    assert len(data) > 4
    lengths = {"cut to 0": 0, "cut to 1": 1, "cut to half": len(data) // 2, "without the last byte": len(data) - 1}
    if kind == "missing":
        path.unlink()
    elif kind in lengths:
        path.write_bytes(data[: lengths[kind]])
    else:
        data[{"flipped first": 0, "flipped middle": len(data) // 2, "flipped last": -1}[kind]] ^= 1
        path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".tmp" not in path.parts}


@pytest.fixture
def copy(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(finished[0], tmp_path / "store")
    return tmp_path / "store"


def test_the_list_of_files_is_that_of_a_checkpoint(copy: Path) -> None:
    assert {path.name for path in (copy / NEWEST).iterdir()} == set(FILES)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_the_newest_sound_checkpoint_is_found_and_the_damaged_file_named(copy: Path, file: str, kind: str) -> None:
    """RS07, on each file of a real checkpoint."""
    damage(copy / NEWEST / file, kind)
    before = contents(copy)
    store = open_store(str(copy))
    found = newest_valid(store, read_head(store, KEY)[0])
    assert found.manifest is not None
    assert found.manifest.step == 4
    (problem,) = found.problems
    assert "step 5" in problem
    assert file in problem
    assert contents(copy) == before


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_head_costs_nothing(copy: Path, kind: str) -> None:
    """HEAD is rebuilt from the manifests: the newest checkpoint is used, and no later attempt writes where an older one wrote."""
    before = contents(copy)
    damage(copy / HEAD, kind)
    store = open_store(str(copy))
    if kind != "missing":
        with pytest.raises(DamagedError, match=r"HEAD\.json.* is damaged"):
            read_head(store, KEY)
    attempt = Attempt.begin(store, KEY)
    assert [line.step for line in attempt.head.checkpoints] == [5, 4]
    assert attempt.epoch > 1
    assert "HEAD.json" in attempt.problems[0]
    assert ("missing" if kind == "missing" else "damaged") in attempt.problems[0]
    found = newest_valid(store, attempt.head)
    assert found.manifest is not None
    assert (found.manifest.step, found.problems) == (5, ())
    assert {name: data for name, data in contents(copy).items() if name != HEAD} == {
        name: data for name, data in before.items() if name != HEAD
    }


@pytest.mark.parametrize("kind", DAMAGES)
def test_without_head_a_damaged_manifest_is_not_believed(copy: Path, kind: str) -> None:
    """A manifest's digest stood in HEAD; without it, it must agree with its place and with the state file it names."""
    (copy / HEAD).unlink()
    damage(copy / NEWEST / "MANIFEST.json", kind)
    store = open_store(str(copy))
    attempt = Attempt.begin(store, KEY)
    found = newest_valid(store, attempt.head)
    assert found.manifest is not None
    assert found.manifest.step == 4
    assert kind == "missing" or any("step 5" in problem for problem in (*attempt.problems, *found.problems))


@pytest.mark.parametrize(
    ("old", "new"), [(b'"cur_step": 5', b'"cur_step": 4'), (b'"step": 5', b'"step": 6'), (b'"epoch": 1,', b'"epoch": 2,')]
)
def test_without_head_a_manifest_with_another_number_is_not_believed(copy: Path, old: bytes, new: bytes) -> None:
    (copy / HEAD).unlink()
    path = copy / NEWEST / "MANIFEST.json"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    attempt = Attempt.begin(open_store(str(copy)), KEY)
    assert [line.step for line in attempt.head.checkpoints] == [4]
    assert any("checkpoint of step 5 is not used" in problem for problem in attempt.problems)


def test_every_digit_of_head_counts(copy: Path) -> None:
    """A changed digit is still JSON: only HEAD's own digest tells that the number of the attempt is another."""
    path = copy / HEAD
    path.write_bytes(path.read_bytes().replace(b'"epoch": 1', b'"epoch": 0'))
    with pytest.raises(DamagedError, match="its digest is another one"):
        read_head(open_store(str(copy)), KEY)


def test_steps_are_compared_as_numbers_and_other_names_left_alone(tmp_path: Path) -> None:
    """RS09, where names decide: in a rebuilt HEAD. A step of ten digits is newer than one of nine, and touched last means nothing."""
    from tests.checkpoint.test_manifest import save

    store = open_store(str(tmp_path))
    attempt = Attempt.begin(store, KEY)
    for step in (900, 999_999_999, 1_000_000_000, 950):
        save(attempt, step, lambda lines: (lines, ()), with_state=True)
    for name in ("step-2000000000-e1-tmp", "step-best-e1", "step-3000000000"):
        store.put(f"data/train/{KEY}/{name}/MANIFEST.json", b"{}")
    store.delete(HEAD)
    again = Attempt.begin(store, KEY)
    assert [line.step for line in again.head.checkpoints] == [1_000_000_000, 999_999_999, 950, 900]
    assert len(again.problems) == 1


@pytest.mark.parametrize("file", [*(f"{NEWEST}/{name}" for name in FILES), HEAD])
def test_training_goes_on_from_the_one_before_to_the_same_result(
    training: Training, finished: tuple[Path, dict[str, Any]], copy: Path, file: str
) -> None:
    damage(copy / file, "flipped middle")
    said: list[str] = []
    steps = Steps()
    last = training.run(str(copy), said, steps)
    assert Path(file).name in said[0]
    assert steps.done == ([] if file == HEAD else [5])
    assert outcome(open_store(str(copy)), last) == finished[1]
    head, _ = read_head(open_store(str(copy)), KEY)
    assert [line.step for line in head.checkpoints] == [5, 4]


def test_when_all_are_damaged_training_starts_anew_and_says_so(
    training: Training, finished: tuple[Path, dict[str, Any]], copy: Path
) -> None:
    for path in copy.glob("data/train/*/*/optimizer.safetensors"):
        damage(path, "flipped last")
    said: list[str] = []
    steps = Steps()
    last = training.run(str(copy), said, steps)
    assert [line.split(":")[0] for line in said] == ["checkpoint of step 5 is not used", "checkpoint of step 4 is not used"]
    assert steps.done == [1, 2, 3, 4, 5]
    assert outcome(open_store(str(copy)), last) == finished[1]


def test_a_replay_after_damage_does_not_delete_the_only_sound_one(training: Training, copy: Path) -> None:
    """The newest is damaged, one is kept: until the replayed step is committed, the older one stays."""
    damage(copy / NEWEST / "optimizer.safetensors", "flipped last")
    with pytest.raises(Stopped):
        training.run(str(copy), [], Steps({5: stop}))
    store = open_store(str(copy))
    found = newest_valid(store, read_head(store, KEY)[0])
    assert found.manifest is not None
    assert found.manifest.step == 4
