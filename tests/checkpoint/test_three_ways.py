"""Through the whole training loop: uninterrupted equals resumed, to the bit, and a resume of the weights alone is neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from storage.artifact import FileEntry
from storage.store import open_store
from tests.checkpoint.training import KEY, LORA, Steps, Stop, Training, outcome, stop
from twinkle_core.checkpoint.manifest import read_head
from twinkle_core.config import LoraConfig
from twinkle_core.model import TransformersModel


def weights_only(self: TransformersModel, store_url: str, prefix: str, entries: Sequence[FileEntry]) -> None:
    self.restore(Path(store_url.removeprefix("file://")) / prefix, only_weights=True)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_uninterrupted_is_resumed_and_is_not_weights_only(
    training: Training, lora: LoraConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are shuffled, the schedule moves, adapters drop out; resumed after step 2, and step 3 takes rows of both epochs."""
    training = replace(training, lora=lora)
    said: list[str] = []
    whole = outcome(open_store(str(tmp_path / "whole")), training.run(str(tmp_path / "whole"), said))
    for name in ("resumed", "weights-only"):
        with pytest.raises(Stop):
            training.run(str(tmp_path / name), said, Steps({4: stop}))
        assert [line.step for line in read_head(open_store(str(tmp_path / name)), KEY)[0].checkpoints] == [2]
    assert said == []
    steps = Steps()
    resumed = outcome(open_store(str(tmp_path / "resumed")), training.run(str(tmp_path / "resumed"), said, steps))
    assert steps.done == [3, 4, 5]
    assert said == ["resuming after step 2 (8 rows consumed): 3 steps remain"]
    assert resumed == whole
    monkeypatch.setattr(TransformersModel, "restore_from", weights_only)
    other = outcome(open_store(str(tmp_path / "weights-only")), training.run(str(tmp_path / "weights-only"), said, Steps()))
    curves = [found["curve"] for found in (whole, other)]
    assert [row["consumed_train_samples"] for row in curves[0]] == [4, 8, 12, 16, 18]
    assert curves[0][:2] == curves[1][:2]
    assert curves[0][2]["loss"] == curves[1][2]["loss"], "the same weights, rows and dropout"
    assert curves[0][2]["lr"] != curves[1][2]["lr"]
    assert all(curves[0][step]["loss"] != curves[1][step]["loss"] for step in (3, 4))
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert whole[file] != other[file]
    assert len({row["lr"] for row in curves[0]}) > 3
