"""The loop reads what its steps gave when a checkpoint is due, at the end, and about once a second; never between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.store import Store, open_store
from tests.model.tiny_models import packed_row, save_model
from twinkle_core.checkpoint.manifest import Attempt, TrainerState, read_head
from twinkle_core.checkpoint.retain import keep_policy
from twinkle_core.checkpoint.save import Checkpointer
from twinkle_core.config import LoraConfig, TrainConfig
from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.errors import TrainingError
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel
from twinkle_core.trainer import pace, sft
from twinkle_core.trainer.pace import Pace

KEY = "c" * 64
NUM_STEPS = 7
Row = dict[str, Any]


class NotedGroup(LocalGroup):
    """Notes every call."""

    def __init__(self) -> None:
        super().__init__(TRANSFORMERS_WORKER)
        self.calls: list[str] = []

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.calls.append(method)
        return super().call(method, *args, **options)

    def call_one(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return super().call_one(method, *args)


class Shown:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.num_rows = 0

    def start(self, description: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        self.num_rows += amount
        self.steps += [facts["step"]] if "step" in facts else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=1)


def fine_tune(folder: Path, store: Store, *, save_every: int, bad_step: int = 0) -> tuple[NotedGroup, list[Row], list[Row], Shown]:
    """The calls, the history, the logged rows and the progress of a training of seven steps, two rows each."""
    rows = [packed_row(4 + number % 3, seed=number) for number in range(2 * NUM_STEPS)]
    if bad_step:
        place = 2 * bad_step - 1
        rows[place] = replace(rows[place], loss_weights=np.full(len(rows[place].input_ids), np.inf, dtype=np.float32))
    group, history, logged, shown = NotedGroup(), [], [], Shown()
    model = TransformersModel(folder, group=group, seed=1)
    model.add_adapter_to_model("default", LoraConfig(rank=2))
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("LinearWarmupScheduler", num_training_steps=NUM_STEPS, num_warmup_steps=2)
    group.calls.clear()
    checkpointer = Checkpointer(Attempt.begin(store, KEY), model, save_every=save_every, keep=keep_policy(keep_last=9), say=str)
    try:
        sft.train(
            model=model,
            loader=DataLoader(rows, batch_size=2, shuffle=False, num_epochs=1, num_workers=1),
            config=TrainConfig(batch_size=2),
            state=TrainerState(),
            history=history,
            checkpointer=checkpointer,
            log=logged.append,
            progress=shown,
        )
    except TrainingError as error:
        logged.append({"error": str(error)})
    return group, history, logged, shown


def without_clock(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in sft.CLOCK_FIELDS} for row in rows]


@pytest.mark.parametrize(("seconds", "num_reads"), [(1e9, 3), (0.0, NUM_STEPS)])
def test_steps_between_readings_make_two_calls_each_and_the_history_is_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, num_reads: int
) -> None:
    monkeypatch.setattr(pace, "READ_SECONDS", seconds)
    group, history, logged, shown = fine_tune(folder, open_store(str(tmp_path)), save_every=3)
    assert group.calls.count("take_readings") == num_reads, "at steps 3, 6 and the last, or at each"
    assert group.calls.count("forward_backward") == group.calls.count("clip_grad_and_step") == NUM_STEPS
    saving = {"close_window", "begin_save", "wait_for_save", "end_save"}
    assert set(group.calls) - saving == {"take_readings", "forward_backward", "clip_grad_and_step"}
    assert (
        group.calls[:4]
        == ["forward_backward", "clip_grad_and_step"]
        + (["take_readings"] if not seconds else [])
        + (["forward_backward", "clip_grad_and_step"][: 2 if seconds else 1])
    )
    assert history == logged and [row["step"] for row in history] == shown.steps == list(range(1, NUM_STEPS + 1))
    assert [row["lr"] for row in history] == pytest.approx([1e-2 * part for part in (0.5, 1, 1, 0.8, 0.6, 0.4, 0.2)])
    assert shown.num_rows == 2 * NUM_STEPS
    assert all(0 <= row["loader_wait"] < 1 and row["tokens_per_second"] > 0 for row in history)
    assert [row["time"] for row in history] == sorted(row["time"] for row in history)
    every_step = without_clock(history)
    monkeypatch.setattr(pace, "READ_SECONDS", 0.0)
    assert without_clock(fine_tune(folder, open_store(str(tmp_path / "other")), save_every=2)[1]) == every_step


@pytest.mark.parametrize("seconds", [1e9, 0.0])
def test_no_checkpoint_of_a_model_that_broke_is_committed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(pace, "READ_SECONDS", seconds)
    store = open_store(str(tmp_path))
    group, _, logged, _ = fine_tune(folder, store, save_every=5, bad_step=3)
    assert logged[-1]["error"].startswith("loss of micro-batch 1 is inf at optimizer step 3")
    assert [row["step"] for row in logged[:-1]] == [1, 2], "what was sound is shown"
    assert group.calls.count("forward_backward") == (5 if seconds else 3)
    assert read_head(store, KEY)[0].checkpoints == ()
    assert "begin_save" not in group.calls
    group, _, logged, _ = fine_tune(folder, store, save_every=2, bad_step=5)
    assert [checkpoint.step for checkpoint in read_head(store, KEY)[0].checkpoints] == [2], "one of before it stays"


def test_speed_is_measured_from_reading_to_reading_the_loaders_share_included() -> None:
    now = [100.0]
    clock = Pace(lambda: now[0])

    def slow() -> Any:
        for number in range(4):
            now[0] += 0.5  # the loader takes half a second
            yield number

    taken = []
    for number in clock.batches(slow()):
        assert not clock.is_time or now[0] >= 101.0
        now[0] += 0.25  # a step is handed over
        taken.append(number)
        if len(taken) == 2:
            now[0] += 0.5  # the device is waited for
            assert clock.is_time
            assert clock.read(600) == {"tokens_per_second": 300.0, "loader_wait": 0.5}
            assert not clock.is_time
    assert taken == [0, 1, 2, 3]
    assert clock.read(150) == {"tokens_per_second": 100.0, "loader_wait": pytest.approx(2 / 3)}
