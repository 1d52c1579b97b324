"""A disk that fills and an S3 that fails, hangs, breaks off or lies, while training runs: it goes on, and never on a store's word alone."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save_file

from storage.artifact import FileEntry
from storage.store import Store, open_store
from storage.transfer import upload_folder
from tests.checkpoint.training import KEY, Steps, Training, outcome
from tests.s3_proxy import Fault, Proxy, proxy_before
from tests.servers import create_bucket, s3_server
from twinkle_core.checkpoint import save as saving
from twinkle_core.checkpoint.manifest import Attempt, Head, Manifest, TrainerState, read_head
from twinkle_core.checkpoint.restore import newest_valid
from twinkle_core.checkpoint.retain import keep_policy
from twinkle_core.checkpoint.save import Checkpointer
from twinkle_core.errors import StorageError
from twinkle_core.model import checkpoint_files

Finished = tuple[Path, dict[str, Any]]
ROOT = Path(__file__).parents[2]


def listed_and_whole(store: Store) -> list[int]:
    """Steps that HEAD lists; each is whole."""
    head, _ = read_head(store, KEY)
    assert newest_valid(store, head).problems == ()
    return [line.step for line in head.checkpoints]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FINAL_PAUSES_SECONDS", (0.0, 0.0))


# A disk that is full -----------------------------------------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
import os, sys
from pathlib import Path
import tests.checkpoint.training as t
from twinkle_core.checkpoint import save
from twinkle_core.errors import StorageError
from twinkle_core.trainer import pace
save.FINAL_PAUSES_SECONDS = (0.0,)
pace.READ_SECONDS = 0.0
disk, base, shards = map(Path, sys.argv[1:4])
said, ballast = [], disk / "ballast"
free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
def fill():
    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(bytes(max(0, room - 20_000)))
steps = t.Steps({1: fill, 2: lambda: None, 3: ballast.unlink})
last = t.Training(model_folder=base, shards=shards).run(str(disk / "store"), said, steps)
print(last.step, len(said), *[line.replace("\\n", " ") for line in said], sep="\\n")
store = t.open_store(str(disk / "store"))
print(sorted(t.outcome(store, last).items()))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint(training: Training, finished: Finished, tmp_path: Path) -> None:
    """A real one, of the kernel: full when the checkpoint of step 2 is written, with room again before that of step 4."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "script.py").write_text(ON_A_SMALL_DISK)
    command = shlex.join([sys.executable, str(tmp_path / "script.py"), str(disk), str(training.model_folder), str(training.shards)])
    script = f"mount -t tmpfs -o size=4m none {disk} && exec {command}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace of its own is to be had here: a small disk cannot be made")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    step, number, *rest = done.stdout.splitlines()
    assert (step, number) == ("5", "1")
    assert "checkpoint of step 2 was not saved" in rest[0]
    assert os.strerror(errno.ENOSPC) in rest[0]
    assert rest[1] == str(sorted(finished[1].items()))


class Full:
    """In the place of `shutil.copyfile`: the disk is full after `num_bytes` of certain copies of a file."""

    def __init__(self, file: str, num_bytes: int, is_full: Callable[[int], bool]) -> None:
        self._file, self._num_bytes, self._is_full, self._real = file, num_bytes, is_full, shutil.copyfile
        self.num_copies = 0

    def __call__(self, source: Path, target: Path) -> None:
        if source.name == self._file:
            self.num_copies += 1
            if self._is_full(self.num_copies):
                target.write_bytes(source.read_bytes()[: self._num_bytes])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        self._real(source, target)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors", "training.json"])
@pytest.mark.parametrize("num_bytes", [0, 10])
def test_the_stores_disk_is_full_after_some_files(
    training: Training, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, num_bytes: int
) -> None:
    monkeypatch.setattr("storage.local.shutil.copyfile", Full(file, num_bytes, lambda copy: copy == 1))
    said: list[str] = []
    last = training.run(str(tmp_path), said)
    assert len(said) == 1
    assert "the checkpoint of step 2 was not saved" in said[0]
    assert os.strerror(errno.ENOSPC) in said[0]
    assert outcome(open_store(str(tmp_path)), last) == finished[1]
    assert listed_and_whole(open_store(str(tmp_path))) == [5, 4]


def test_the_scratch_disk_is_full(training: Training, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpoint_files.save_file, []

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path.name)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint_files, "save_file", save_file)
    said: list[str] = []
    last = training.run(str(tmp_path), said)
    assert len(said) == 1
    assert calls[1] in said[0]
    assert os.strerror(errno.ENOSPC) in said[0]
    assert outcome(open_store(str(tmp_path)), last) == finished[1]


def test_a_disk_that_fills_and_stays_full_ends_the_run_with_one_error_and_what_was_saved(
    training: Training, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full from the second save on; the last one is tried three times. With room again, the next run goes on from step 2."""
    full = Full("optimizer.safetensors", 7, lambda copy: copy > 1)
    monkeypatch.setattr("storage.local.shutil.copyfile", full)
    said: list[str] = []
    with pytest.raises(StorageError, match=r"the last checkpoint, of step 5, could not be saved in 3 tries: .*No space left"):
        training.run(str(tmp_path), said)
    assert full.num_copies >= 4
    assert listed_and_whole(open_store(str(tmp_path))) == [2]
    monkeypatch.setattr("storage.local.shutil.copyfile", full._real)
    steps = Steps()
    last = training.run(str(tmp_path), said, steps)
    assert steps.done == [3, 4, 5]
    assert outcome(open_store(str(tmp_path)), last) == finished[1]


def test_saves_that_fail_without_end_stop_the_run(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FAILED_SAVES", 1)
    monkeypatch.setattr("storage.local.shutil.copyfile", Full("rng.safetensors", 7, lambda copy: True))
    steps = Steps()
    with pytest.raises(StorageError, match="1 checkpoints in a row could not be saved, the last one of step 2: .*No space left"):
        training.run(str(tmp_path), [], steps)
    assert max(steps.done) < 5
    assert listed_and_whole(open_store(str(tmp_path))) == []


# S3 ----------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        create_bucket(environment, "tests")
        yield environment


@pytest.fixture
def direct(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return open_store(f"s3://tests/{uuid.uuid4().hex}")


@pytest.fixture
def proxy(
    request: pytest.FixtureRequest, direct: Store, s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    if "hang" in request.node.callspec.params.values():
        monkeypatch.setattr("storage.s3.READ_SECONDS", 3.0)  # long enough for an honest answer of a busy machine
    with proxy_before(urlsplit(s3_environment["AWS_ENDPOINT_URL"]).netloc) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield server


FILES = ("adapter_model.safetensors", "optimizer.safetensors", "training.json", "history.jsonl", "MANIFEST.json", "HEAD.json")
FAULTS: tuple[Fault | int, ...] = (500, "hang", "drop request", "drop answer", "keep nothing", "keep half", "keep other bytes")


FAST = (("optimizer.safetensors", 500), ("optimizer.safetensors", "keep half"), ("HEAD.json", "drop answer"), ("HEAD.json", "keep nothing"))


def pairs(files: Sequence[str], faults: Sequence[Fault | int]) -> list[Any]:
    """Every fault at every file; all but a few of them are slow, since there are many."""
    made = [(file, fault) for file in files for fault in faults]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=[] if pair in FAST else [pytest.mark.slow]) for pair in made]


class Wrong:
    """Misbehaves at the write of one file, whenever it is the `number`-th write of it."""

    def __init__(self, proxy: Proxy, fault: Fault | int, file: str, is_wrong: Callable[[int], bool]) -> None:
        self._fault, self._file, self._is_wrong = fault, file, is_wrong
        self.num_writes = 0
        proxy.answer_instead = lambda method, path: fault if isinstance(fault, int) and self._hits(method, path) else None
        if not isinstance(fault, int):
            proxy.fault = lambda method, path: fault if self._hits(method, path) else None

    def _hits(self, method: str, path: str) -> bool:
        is_write = method == "PUT" and path.split("?")[0].endswith(self._file)
        self.num_writes += is_write
        return is_write and self._is_wrong(self.num_writes)


def in_the_first_save(file: str) -> Callable[[int], bool]:
    """Beginning the attempt writes HEAD, too."""
    return lambda number: number == (2 if file == "HEAD.json" else 1)


class Writer:
    """Saves a state of two numbers as a worker saves a model's, in the same files: what a store does to them is the same."""

    def __init__(self, folder: Path) -> None:
        self.value = 0.0
        self._folder = folder
        self._pool = ThreadPoolExecutor(1)
        self._save: Future[tuple[FileEntry, ...]] | None = None

    def begin_save(self, store_url: str, prefix: str) -> None:
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            save_file({"value": torch.tensor([self.value, 1.0])}, self._folder / name)
        (self._folder / "training.json").write_text(json.dumps({"value": self.value}))
        self._save = self._pool.submit(lambda: upload_folder(open_store(store_url), self._folder, prefix))

    def end_save(self, block: bool) -> tuple[FileEntry, ...] | None:
        assert self._save is not None
        return self._save.result() if block or self._save.done() else None


def train(folder: Path, url: str, said: list[str], keep_last: int = 2) -> Manifest:
    """Five steps, saved after 2, 4 and 5, or those that are left: the loop of `trainer.sft` without a model."""
    store = open_store(url)
    attempt = Attempt.begin(store, KEY)
    found = newest_valid(store, attempt.head)
    said += [*attempt.problems, *found.problems]
    state = found.manifest.state if found.manifest else TrainerState()
    folder.mkdir(exist_ok=True)
    writer = Writer(folder)
    checkpointer = Checkpointer(attempt, writer, save_every=2, keep=keep_policy(keep_last=keep_last), say=said.append)
    for step in range(state.cur_step + 1, 6):
        state = TrainerState(cur_step=step)
        writer.value = float(step)
        checkpointer.after_step(state, [{"step": n} for n in range(1, step + 1)])
    return checkpointer.finish(state, [{"step": n} for n in range(1, 6)])


@pytest.mark.parametrize(("file", "fault"), pairs(FILES, FAULTS))
def test_a_store_that_misbehaves_once_costs_one_checkpoint(
    direct: Store, proxy: Proxy, fault: Fault | int, file: str, tmp_path: Path
) -> None:
    """The save of step 2 fails and is told; the later ones stand, and nothing that is not whole was ever committed."""
    Wrong(proxy, fault, file, in_the_first_save(file))
    said: list[str] = []
    if file == "HEAD.json" and fault in ("keep half", "keep other bytes"):
        with pytest.raises(StorageError, match=r"HEAD\.json.* is damaged .*run the training again, which rebuilds it"):
            train(tmp_path / "writer", direct.url, said)
        said.clear()
    last = train(tmp_path / "writer", direct.url, said)
    assert proxy.num_misbehaved == 1
    assert last.step == 5
    assert listed_and_whole(direct)[:1] == [5]
    if (file, fault) == ("HEAD.json", "drop answer"):
        assert said == [], "the write was done, and HEAD itself tells"
        return
    assert len(said) == 1
    assert file in said[0]
    assert "the checkpoint of step 2 was not saved: " in said[0] or file == "HEAD.json"


@pytest.mark.parametrize(("file", "fault"), pairs(("optimizer.safetensors", "MANIFEST.json", "HEAD.json"), FAULTS[-3:]))
def test_a_store_that_lies_about_every_later_save_never_costs_the_one_that_is_whole(
    direct: Store, proxy: Proxy, fault: Fault, file: str, tmp_path: Path
) -> None:
    """One checkpoint is kept: believing the store once would delete it for one that is not there."""
    first = 2 if file == "HEAD.json" else 1
    Wrong(proxy, fault, file, lambda number: number > first)
    said: list[str] = []
    with pytest.raises(StorageError, match=rf"the last checkpoint, of step 5, could not be saved in 3 tries: .*{file}"):
        train(tmp_path / "writer", direct.url, said, keep_last=1)
    assert proxy.num_misbehaved >= 1
    proxy.fault = lambda method, path: None
    found = newest_valid(direct, Attempt.begin(direct, KEY).head)
    assert found.manifest is not None
    assert found.manifest.step == 2 or (file, fault) == ("HEAD.json", "keep half") or (file, fault) == ("HEAD.json", "keep other bytes")
    assert newest_valid(
        direct, Head(checkpoints=tuple(line for line in Attempt.begin(direct, KEY).head.checkpoints if line.step == 2))
    ).manifest
    assert train(tmp_path / "writer", direct.url, said, keep_last=1).step == 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_training_on_a_store_that_misbehaves_once_ends_in_the_same_model(
    training: Training, finished: Finished, direct: Store, proxy: Proxy, fault: Fault | int
) -> None:
    Wrong(proxy, fault, "optimizer.safetensors", lambda number: number == 1)
    said: list[str] = []
    last = training.run(direct.url, said)
    assert proxy.num_misbehaved == 1
    assert outcome(direct, last) == finished[1]
    assert listed_and_whole(direct) == [5, 4]
    assert len(said) == 1
    assert "the checkpoint of step 2 was not saved: " in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [500, "hang", "drop request", "drop answer"])
def test_a_store_that_does_not_answer_at_a_resume_ends_the_run_and_costs_nothing(
    training: Training, finished: Finished, direct: Store, proxy: Proxy, fault: Fault | int
) -> None:
    """What cannot be read is not damaged: going back to an older one, or to the start, would throw work away."""
    for path in (path for path in finished[0].rglob("*") if path.is_file() and ".tmp" not in path.parts):
        direct.put(str(path.relative_to(finished[0])), path.read_bytes())
    before = {info.key: info.size for info in direct.list()}

    def hits(method: str, path: str) -> bool:
        return method == "GET" and "step-000000005-e1/optimizer.safetensors" in path

    proxy.answer_instead = lambda method, path: fault if isinstance(fault, int) and hits(method, path) else None
    if not isinstance(fault, int):
        proxy.fault = lambda method, path: fault if hits(method, path) else None
    said: list[str] = []
    with pytest.raises(StorageError, match=r"could not read bytes .*step-000000005-e1/optimizer\.safetensors"):
        training.run(direct.url, said)
    assert said == []
    assert {info.key: info.size for info in direct.list()} == before
    proxy.answer_instead, proxy.fault = (lambda method, path: None), (lambda method, path: None)
    steps = Steps()
    assert outcome(direct, training.run(direct.url, said, steps)) == finished[1]
    assert steps.done == []
    assert said == ["resuming after step 5 (18 rows consumed): no step remains"]
