from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.architecture.sources import ROOT
from twinkle_core.config import TemplateConfig
from twinkle_core.errors import DataError, WorkerLostError
from twinkle_core.preprocessor.run import trajectory_line
from twinkle_core.sharding import EncodedDataset
from twinkle_core.template import Outcome, Template, encode
from twinkle_core.template.processes import IN_FLIGHT_BYTES, ProcessMap, _reply
from twinkle_core.types import NoProgress, Trajectory

_spec = importlib.util.spec_from_file_location("template_kinds_stage", Path(__file__).parent / "conftest.py")
assert _spec is not None and _spec.loader is not None
kinds = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kinds)

Folder = Callable[[str], Path]


def write(folder: Path, train: Sequence[Trajectory], held_out: Sequence[Trajectory]) -> Path:
    folder.mkdir()
    for name, rows in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(map(trajectory_line, rows)))
    return folder


def say(words: int, **extra: Any) -> Trajectory:
    messages = [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": f"ok {words}"}]
    return {"messages": messages, **extra}  # type: ignore[typeddict-item]


def made(template: Any, source: Path, out: Path, **options: Any) -> dict[str, Any]:
    out.mkdir()
    return encode(source, template, out, NoProgress(), **options)


def adds_up(side: dict[str, Any]) -> None:
    """Each row is in one of the counts, and only a split makes more samples than rows."""
    assert side["conversations"] == side["encoded"] + sum(side["dropped"].values()) + side["refused"]
    assert side["samples"] == side["encoded"] if not side["split"] else side["samples"] > side["encoded"]
    assert len(side["refused_rows"]) == min(side["refused"], 20)


def test_stage_writes_what_the_template_encodes_and_no_token_is_lost(tokenizer_folder: Folder, tmp_path: Path) -> None:
    rows = [say(words) for words in range(1, 600)]  # more than two batches
    template = Template(tokenizer_folder(kinds.CHATML), max_length=200, truncation_strategy="left")
    report = made(template, write(tmp_path / "in", rows, rows[:3]), tmp_path / "out", part_rows=256)
    written, train = EncodedDataset(tmp_path / "out"), report["train"]
    expected = template.encoder().outcomes(rows)
    assert [path.name for path in sorted((tmp_path / "out").glob("train*"))] == [f"train-0000{part}.arrow" for part in range(3)]
    assert len(written) == len(rows) == train["documents"] == train["samples"]
    assert written.rows() == list(range(len(rows)))
    for i in (0, 255, 256, 512, 598):
        (sample,) = expected[i].samples
        assert written[i].input_ids.tolist() == sample.input_ids.tolist()
        assert written[i].labels.tolist() == sample.labels.tolist()
        assert written[i].seq_lens.tolist() == [len(sample.input_ids)]
    assert train["truncated"] == sum(outcome.num_tokens > 200 for outcome in expected) > 0
    assert train["tokens"] + train["truncated_tokens"] == sum(outcome.num_tokens for outcome in expected)
    assert train["supervised_tokens"] == sum(outcome.samples[0].num_loss_tokens for outcome in expected)
    assert train["longest"] == 200
    assert report["held_out"]["documents"] == len(EncodedDataset(tmp_path / "out", "held_out")) == 3
    adds_up(train)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


def test_columns_have_the_promised_types_and_an_empty_side_has_a_file(tokenizer_folder: Folder, tmp_path: Path) -> None:
    made(Template(tokenizer_folder(kinds.CHATML)), write(tmp_path / "in", [say(1)], []), tmp_path / "out")
    with pa.ipc.open_file(str(tmp_path / "out" / "train-00000.arrow")) as reader:
        assert {field.name: str(field.type) for field in reader.schema} == {
            "input_ids": "large_list<item: int32>", "labels": "large_list<item: int32>", "seq_lens": "list<item: int32>",
            "kinds": "list<item: int8>", "loss_weights": "large_list<item: float>", "row": "int64",
        }  # fmt: skip
    with pa.ipc.open_file(str(tmp_path / "out" / "held_out-00000.arrow")) as reader:
        assert reader.num_record_batches == 0
    assert len(EncodedDataset(tmp_path / "out", "held_out")) == 0


def test_samples_of_several_documents_and_weights_are_kept(tokenizer_folder: Folder, tmp_path: Path) -> None:
    weighted = say(2)
    weighted["messages"][1]["loss_weight"] = 0.5
    pair = say(3, rejected_messages=say(4)["messages"])
    rows = [say(1), weighted, pair, {"messages": [], "text": "one two three"}]
    template = Template(tokenizer_folder(kinds.CHATML))
    report = made(template, write(tmp_path / "in", rows, []), tmp_path / "out")  # type: ignore[arg-type]
    written, expected = EncodedDataset(tmp_path / "out"), template.encoder().outcomes(rows)  # type: ignore[arg-type]
    assert report["train"]["documents"] == 5
    for i, outcome in enumerate(expected):
        (sample,) = outcome.samples
        for name in ("input_ids", "labels", "seq_lens", "kinds", "loss_weights"):
            mine, theirs = getattr(written[i], name), getattr(sample, name)
            assert (mine is None and theirs is None) or mine.tolist() == theirs.tolist(), (i, name)
    assert written[1].loss_weights is not None
    assert written[0].loss_weights is None


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte(tokenizer_folder: Folder, tmp_path: Path) -> None:
    rows = [say(1 + words % 700) for words in range(3000)]
    source = write(tmp_path / "in", rows, rows[:700])
    template = Template(tokenizer_folder(kinds.CHATML), max_length=300, truncation_strategy="split")
    folders = {}
    for num_proc in (1, 2, 3):
        template.config = TemplateConfig(max_length=300, truncation="split", num_proc=num_proc)
        report = made(template, source, tmp_path / f"out-{num_proc}", part_rows=1024)
        folders[num_proc] = {path.name: path.read_bytes() for path in sorted((tmp_path / f"out-{num_proc}").iterdir())}
        adds_up(report["train"])
        assert report["train"]["split"] > 0
    assert len(folders[1]) == 3 + 1 + 1
    assert folders[1] == folders[2] == folders[3]


def test_dropped_documents_are_counted_and_none_left_is_an_error(tokenizer_folder: Folder, tmp_path: Path) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), max_length=60, truncation_strategy="delete")
    report = made(template, write(tmp_path / "some", [say(1), say(100), say(2)], []), tmp_path / "out")
    assert report["train"]["dropped"] == {"too_long": 1, "no_loss": 0}
    adds_up(report["train"])
    assert report["train"]["documents"] == len(EncodedDataset(tmp_path / "out")) == 2
    assert EncodedDataset(tmp_path / "out").rows() == [0, 2]
    with pytest.raises(DataError, match="no document is left"):
        made(template, write(tmp_path / "none", [say(100)] * 8, []), tmp_path / "out2")


@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_row_that_cannot_be_encoded_is_named(
    tokenizer_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_proc: int
) -> None:
    monkeypatch.setattr("twinkle_core.template.run.PROCESS_BYTES", 1)
    monkeypatch.setattr("twinkle_core.template.run.THREAD_BYTES", 1)
    rows = [say(1 + i % 5) for i in range(600)]
    rows[555] = say(100, user_data=[("source", "chats")])
    template = Template(tokenizer_folder(kinds.CHATML), TemplateConfig(max_length=60, num_proc=num_proc))
    with pytest.raises(DataError, match=r"train.jsonl, line 556: .*max_length is 60.*source 'chats'"):
        made(template, write(tmp_path / "in", rows, []), tmp_path / "out", part_rows=300)
    source = write(tmp_path / "broken", rows[:500], [])
    with (source / "train.jsonl").open("ab") as file:
        file.write(b'{"messages": \n')
    with pytest.raises(DataError, match=r"train.jsonl, line 501: not valid JSON"):
        made(template, source, tmp_path / "out2", part_rows=300)


def test_refused_rows_are_counted_and_the_first_are_listed(tokenizer_folder: Folder, tmp_path: Path) -> None:
    rows = [say(100) if i % 10 == 3 else say(1) for i in range(400)]
    template = Template(tokenizer_folder(kinds.CHATML), TemplateConfig(max_length=60, on_bad_row="skip"))
    train = made(template, write(tmp_path / "in", rows, []), tmp_path / "out", part_rows=150)["train"]
    assert (train["conversations"], train["refused"], train["encoded"]) == (400, 40, 360)
    assert [row["line"] for row in train["refused_rows"]] == [10 * i + 4 for i in range(20)]
    assert all("max_length is 60" in row["reason"] for row in train["refused_rows"])
    adds_up(train)


@dataclass
class Counting:
    """A template whose encoder notes how many rows it was given; runs in this process alone."""

    template: Template
    rows: int = 0
    stop_after: int = 1 << 60

    @property
    def config(self) -> TemplateConfig:
        return TemplateConfig(num_proc=1)

    def encoder(self) -> Counting:
        return self

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        if self.rows >= self.stop_after:
            raise KeyboardInterrupt
        self.rows += len(trajectories)
        return self.template.encoder().outcomes(trajectories)


class Parts:
    """Keeps what was added, as a store would."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[bytes, str]] = {}

    def finished(self, name: str) -> dict[str, Any] | None:
        return json.loads(self.kept[name][1]) if name in self.kept else None

    def add(self, path: Path, facts: dict[str, Any]) -> None:
        self.kept[path.name] = path.read_bytes(), json.dumps(facts)
        path.unlink()


def test_finished_parts_are_not_made_again_and_the_report_is_the_same(tokenizer_folder: Folder, tmp_path: Path) -> None:
    rows = [say(100) if i % 10 == 3 else say(1 + i % 30) for i in range(1000)]
    config = TemplateConfig(max_length=60, on_bad_row="skip", num_proc=1)
    plain = Template(tokenizer_folder(kinds.CHATML), config)
    source = write(tmp_path / "in", rows, rows[:10])
    expected = Parts()
    report = made(plain, source, tmp_path / "whole", parts=expected, part_rows=100)
    parts, first = Parts(), Counting(plain, stop_after=550)
    with pytest.raises(KeyboardInterrupt):
        made(first, source, tmp_path / "killed", parts=parts, part_rows=100)
    assert first.rows == 600
    num_kept = len(parts.kept)
    assert 5 <= num_kept <= 6
    second = Counting(plain)
    assert made(second, source, tmp_path / "again", parts=parts, part_rows=100) == report
    assert second.rows == 1010 - 100 * num_kept
    assert parts.kept == expected.kept


def test_lines_of_parts_and_batches(tokenizer_folder: Folder, tmp_path: Path) -> None:
    """Large lines, a last line without its end, and exact multiples: each line once, in order."""
    template = Template(tokenizer_folder(kinds.CHATML))
    for number, (num_rows, part_rows) in enumerate([(6, 3), (7, 3), (1, 1), (3, 4)]):
        source = write(tmp_path / f"in{number}", [say(1 + 40 * i) for i in range(num_rows)], [])
        text = (source / "train.jsonl").read_bytes()
        (source / "train.jsonl").write_bytes(text.rstrip(b"\n"))
        report = made(template, source, tmp_path / f"out{number}", part_rows=part_rows)
        assert report["train"]["conversations"] == num_rows
        assert EncodedDataset(tmp_path / f"out{number}").rows() == list(range(num_rows))
        assert len(list((tmp_path / f"out{number}").glob("train*"))) == -(-num_rows // part_rows)


@dataclass(frozen=True)
class Echo:
    """What became of a text: itself, and the process that had it."""

    slow_seconds: float = 0.0
    kill: bytes = b"-"
    parent: int = 0
    fail: Exception | None = None

    def __call__(self, item: bytes) -> tuple[bytes, int]:
        time.sleep(self.slow_seconds)
        if self.fail is not None and os.getpid() != self.parent:
            raise self.fail
        if item == self.kill and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return item, os.getpid()


@pytest.fixture
def test_code_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children unpickle `Echo` from this module, which pytest may have imported under a name of its own."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setitem(sys.modules, "tests.template.test_encode_stage", sys.modules[__name__])
    monkeypatch.setattr(Echo, "__module__", "tests.template.test_encode_stage")


@pytest.mark.slow
@pytest.mark.usefixtures("test_code_importable")
def test_results_come_in_order_from_several_processes_and_little_is_in_flight() -> None:
    taken = 0

    def items() -> Any:
        nonlocal taken
        for i in range(300):
            taken += 1
            yield f"{i}".encode().ljust(IN_FLIGHT_BYTES // 10)

    seen: list[bytes] = []
    pids = set()
    with ProcessMap(Echo(0.01), 3) as mapped:
        for item, pid in mapped(items()):
            seen.append(item.strip())
            pids.add(pid)
            assert taken - len(seen) <= 3 * 10 + 1
    assert seen == [f"{i}".encode() for i in range(300)]
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids - {os.getpid()})


@pytest.mark.slow
@pytest.mark.usefixtures("test_code_importable")
def test_a_killed_process_is_an_error_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"ended by signal 9 \(Killed\)"):
        with ProcessMap(Echo(0.05, kill=b"die", parent=os.getpid()), 3) as mapped:
            list(mapped([b"x"] * 60 + [b"die"] * 60 + [b"x"] * 4000))
    assert time.monotonic() - began < 30


class OneWay(Exception):
    """Pickles, and cannot be made again."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("test_code_importable")
@pytest.mark.parametrize("error", [DataError("row 7 is odd"), OSError(28, "disk full"), MemoryError("enough")])
def test_what_the_work_raises_in_a_process_is_raised_here(error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))) as caught:
        with ProcessMap(Echo(0.01, parent=os.getpid(), fail=error), 2) as mapped:
            list(mapped([b"x"] * 4000))
    assert "in __call__" in "".join(caught.value.__notes__)
    assert not any(thread.name.startswith("encode") for thread in threading.enumerate())


def test_an_error_that_cannot_be_pickled_keeps_its_name_and_reason() -> None:
    def work(item: bytes) -> Any:
        if item == b"error":
            raise OneWay(3, "no way back")
        return lambda: item  # a result that does not pickle

    result, error = pickle.loads(_reply(work, b"error"))  # noqa: S301 - our own bytes
    assert result is None and type(error) is RuntimeError and str(error) == "OneWay: no way back"
    result, error = pickle.loads(_reply(work, b"result"))  # noqa: S301 - our own bytes
    assert result is None and "pickle local object" in str(error)


@pytest.mark.slow
def test_ctrl_c_ends_the_whole_group() -> None:
    """The terminal sends it to all of them."""
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS.format(root=str(ROOT))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pids: set[int] = set()
    while len(pids) < 3:
        pids.add(int(parent.stdout.readline()))
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors
    assert not any(alive(pid) for pid in pids)


ORPHANS = """
import sys, time
sys.path[:0] = [{root!r}]
from twinkle_core.template.processes import ProcessMap
from tests.template.test_encode_stage import Echo
with ProcessMap(Echo(0.05), 3) as mapped:
    for item, pid in mapped(b"x" for _ in range(100000)):
        print(pid, flush=True)
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent() -> None:
    script = ORPHANS.format(root=str(ROOT))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids: set[int] = set()
    while len(pids) < 3:
        pids.add(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(30)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "encoding processes outlive their parent"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_process_that_encodes_imports_nothing_heavy(tokenizer_folder: Folder, tmp_path: Path) -> None:
    """The encoder, unpickled in a fresh interpreter, needs neither transformers nor torch nor Arrow."""
    from multiprocessing.reduction import ForkingPickler

    from twinkle_core.template.lines import EncodeLines

    work = EncodeLines(encoder=Template(tokenizer_folder(kinds.CHATML)).encoder())
    (tmp_path / "work").write_bytes(bytes(ForkingPickler.dumps(work)))
    (tmp_path / "lines").write_bytes(b"".join(map(trajectory_line, [say(1), say(2)])))
    script = (
        "import sys; from multiprocessing.reduction import ForkingPickler; from pathlib import Path\n"
        "import twinkle_core.template.processes\n"
        "made = ForkingPickler.loads(Path('work').read_bytes())(Path('lines').read_bytes())\n"
        "assert made.counts['encoded'] == 2\n"
        "print([name for name in ('transformers', 'torch', 'pyarrow', 'datasets', 'prefect', 'boto3') if name in sys.modules])"
    )
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", script]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
