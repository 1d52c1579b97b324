import json
from dataclasses import replace
from pathlib import Path

import pytest

from storage.artifact import FileEntry
from storage.errors import DamagedError, FencedError, StorageError
from storage.fingerprint import digest_bytes
from storage.store import Store, open_store
from twinkle_core.checkpoint.manifest import Attempt, Manifest, TrainerState, read_head
from twinkle_core.checkpoint.restore import newest_valid
from twinkle_core.checkpoint.retain import keep_policy

KEY = "a" * 64
KEEP_ALL = keep_policy(keep_last=100)


@pytest.fixture
def store(tmp_path: object) -> Store:
    return open_store(str(tmp_path))


def save(attempt: Attempt, step: int, keep=KEEP_ALL, with_state: bool = False) -> Manifest:
    state = TrainerState(cur_step=step, consumed_train_samples=step * 8)
    made = {"w.bin": f"weights of step {step} by {attempt.epoch}".encode()}
    made |= {"trainer_state.json": state.to_json()} if with_state else {}
    for name, data in made.items():
        attempt.store.put(f"{attempt.prefix(step)}/{name}", data)
    files = tuple(FileEntry(path=name, size=len(data), sha256=digest_bytes(data)) for name, data in made.items())
    return attempt.commit(step=step, files=files, state=state, keep=keep)


def test_the_newest_committed_checkpoint_is_found_with_its_state(store: Store) -> None:
    attempt = Attempt.begin(store, KEY)
    save(attempt, 2)
    second = save(attempt, 4)
    found = newest_valid(store, read_head(store, KEY)[0])
    assert found.manifest == second
    assert found.manifest.state.consumed_train_samples == 32
    assert found.problems == ()
    assert Manifest.from_json(second.to_json()) == second


def test_a_new_training_has_nothing_to_resume_from(store: Store) -> None:
    assert newest_valid(store, Attempt.begin(store, KEY).head).manifest is None


def test_an_overtaken_attempt_commits_nothing_and_leaves_head_as_it_was(store: Store) -> None:
    old = Attempt.begin(store, KEY)
    save(old, 2)
    new = Attempt.begin(store, KEY)
    assert new.epoch == old.epoch + 1
    kept = save(new, 4)
    before = read_head(store, KEY)
    with pytest.raises(FencedError, match="attempt 1 was overtaken by attempt 2"):
        save(old, 6)
    assert read_head(store, KEY) == before
    assert newest_valid(store, before[0]).manifest == kept


def test_attempts_of_one_step_never_share_a_file(store: Store) -> None:
    first = Attempt.begin(store, KEY)
    save(first, 2)
    second = Attempt.begin(store, KEY)
    assert first.prefix(2) != second.prefix(2)


@pytest.mark.parametrize("damage", ["manifest missing", "manifest changed", "file missing", "file short", "file changed"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(store: Store, damage: str) -> None:
    attempt = Attempt.begin(store, KEY)
    whole = save(attempt, 2)
    broken = save(attempt, 4)
    target = broken.key if damage.startswith("manifest") else f"{broken.prefix}/w.bin"
    data = store.get(target)
    if damage.endswith("missing"):
        store.delete(target)
    else:
        store.put(target, data[:-1] if damage.endswith("short") else bytes([data[0] ^ 1]) + data[1:])
    found = newest_valid(store, read_head(store, KEY)[0])
    assert found.manifest == whole
    (problem,) = found.problems
    assert "step 4" in problem
    assert ("w.bin" in problem) == damage.startswith("file")


def test_when_every_checkpoint_is_damaged_training_starts_anew_and_says_so(store: Store) -> None:
    attempt = Attempt.begin(store, KEY)
    for step in (2, 4):
        store.delete(f"{save(attempt, step).prefix}/w.bin")
    found = newest_valid(store, read_head(store, KEY)[0])
    assert found.manifest is None
    assert len(found.problems) == 2


def test_retention_keeps_the_last_and_the_multiples_and_deletes_the_files_of_the_rest(store: Store) -> None:
    attempt = Attempt.begin(store, KEY)
    keep = keep_policy(keep_last=1, keep_every=4)
    made = {step: save(attempt, step, keep) for step in (2, 4, 6, 8, 10)}
    head, _ = read_head(store, KEY)
    assert [line.step for line in head.checkpoints] == [10, 8, 4]
    gone = [key for step in (2, 6) for key in (made[step].key, f"{made[step].prefix}/w.bin")]
    assert [store.exists(key) for key in gone] == [False] * 4
    store.delete(f"{made[10].prefix}/w.bin")
    assert newest_valid(store, head).manifest == made[8]


def test_a_replayed_step_replaces_a_damaged_one_in_head(store: Store) -> None:
    first = Attempt.begin(store, KEY)
    save(first, 2)
    store.delete(f"{save(first, 4).prefix}/w.bin")
    second = Attempt.begin(store, KEY)
    again = save(second, 4)
    head, _ = read_head(store, KEY)
    assert [line.step for line in head.checkpoints] == [4, 2]
    assert newest_valid(store, head).manifest == again


def test_head_is_plain_json_that_people_can_read(store: Store) -> None:
    save(Attempt.begin(store, KEY), 2)
    raw = json.loads(store.get(f"checkpoints/{KEY}/HEAD.json"))
    assert raw["epoch"] == 1
    assert raw["checkpoints"][0]["step"] == 2


def test_the_state_file_holds_what_resuming_needs() -> None:
    state = replace(TrainerState(), cur_step=3, consumed_train_samples=24, epoch=1.2, recipe_fingerprint=KEY)
    raw = json.loads(state.to_json())
    expected = {"cur_step": 3, "consumed_train_samples": 24, "gradient_accumulation_steps": 1, "epoch": 1.2, "world_size": 1}
    assert raw.items() >= (expected | {"recipe_fingerprint": KEY}).items()


@pytest.mark.parametrize("lie", ["keeps nothing", "keeps half", "fails after it did it", "fails before it did it"])
def test_a_store_that_lies_about_head_never_costs_a_checkpoint(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is kept: if the move of HEAD were believed, the checkpoint of step 2 would be deleted though HEAD still lists it."""
    store = open_store(str(tmp_path))
    keep = keep_policy(keep_last=1)
    attempt = Attempt.begin(store, KEY)
    first = save(attempt, 2, keep)
    real = type(store).compare_and_swap

    def swap(self: Store, key: str, data: bytes, version: str | None) -> bool:
        if lie == "fails after it did it" or lie == "keeps half":
            real(self, key, data if lie.startswith("fails") else data[: len(data) // 2], version)
        if lie.startswith("fails"):
            raise StorageError("no answer")
        return True

    monkeypatch.setattr(type(store), "compare_and_swap", swap)
    if lie == "fails after it did it":
        second = save(attempt, 4, keep)
        assert newest_valid(store, read_head(store, KEY)[0]).manifest == second
        return
    with pytest.raises(StorageError, match="no answer" if lie.startswith("fails") else "HEAD.json"):
        save(attempt, 4, keep)
    monkeypatch.undo()
    assert store.exists(first.key)
    assert store.exists(f"{first.prefix}/w.bin")
    if lie == "keeps half":
        return
    assert newest_valid(store, read_head(store, KEY)[0]).manifest == first
    assert save(attempt, 6, keep).step == 6
    assert not store.exists(first.key)


def test_a_head_that_is_lost_or_put_back_while_training_runs_is_told(store: Store) -> None:
    attempt = Attempt.begin(store, KEY)
    save(attempt, 2)
    store.delete(f"checkpoints/{KEY}/HEAD.json")
    with pytest.raises(DamagedError, match="is at attempt 0 though attempt 1 runs"):
        save(attempt, 4)


def test_what_cannot_be_deleted_costs_no_commit_and_what_is_committed_is_not_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is kept. If the failed deletion were an error the step would be saved again, over files that HEAD lists by now."""
    keep = keep_policy(keep_last=1)
    attempt = Attempt.begin(store, KEY)
    first = save(attempt, 2, keep)

    def fails(self: Store, key: str) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(type(store), "delete", fails)
    second = save(attempt, 4, keep)
    head, _ = read_head(store, KEY)
    assert [line.step for line in head.checkpoints] == [4]
    assert (second.parent, store.exists(first.key)) == (first.key, True)
    monkeypatch.undo()
    before = store.get_versioned(second.key)
    monkeypatch.setattr(type(store), "compare_and_swap", lambda *_: pytest.fail("HEAD lists it already"))
    assert save(attempt, 4, keep) == second
    assert store.get_versioned(second.key) == before
    assert newest_valid(store, read_head(store, KEY)[0]).manifest == second


def test_a_head_that_was_damaged_before_the_first_checkpoint_fences_the_attempt_that_wrote_it(store: Store) -> None:
    old = Attempt.begin(store, KEY)
    store.put(f"checkpoints/{KEY}/HEAD.json", b"{")
    new = Attempt.begin(store, KEY)
    assert "HEAD.json" in new.problems[0] and new.head.checkpoints == ()
    with pytest.raises(FencedError, match="attempt 1 was overtaken"):
        save(old, 2)
    assert save(new, 2).step == 2


def test_a_head_that_was_put_back_lets_no_attempt_share_a_number_and_costs_no_checkpoint(store: Store) -> None:
    save(Attempt.begin(store, KEY), 2, with_state=True)
    before = store.get(f"checkpoints/{KEY}/HEAD.json")
    running = Attempt.begin(store, KEY)
    newest = save(running, 4, with_state=True)
    store.put(f"checkpoints/{KEY}/HEAD.json", before)
    again = Attempt.begin(store, KEY)
    assert again.epoch > running.epoch
    assert "it is at attempt 1, and attempt 2 wrote files" in again.problems[0]
    assert newest_valid(store, again.head).manifest == newest
    with pytest.raises(FencedError, match="attempt 2 was overtaken"):
        save(running, 6)
