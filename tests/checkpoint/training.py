"""A training so small that it can be run many times: 5 steps, saved after 2, 4 and 5, the last two kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.store import Store, open_store
from tests.model.tiny_models import packed_row
from tests.sharding.shard_files import write_folder
from twinkle_core.checkpoint.manifest import Manifest
from twinkle_core.config import CheckpointConfig, LoraConfig, ResourcesConfig, TrainConfig
from twinkle_core.sharding import PackedDataset
from twinkle_core.trainer.run import SFTJob, run_sft
from twinkle_core.trainer.sft import CLOCK_FIELDS, History

KEY = "0" * 64
NUM_STEPS = 5
LORA = LoraConfig(rank=4, dropout=0.1)


class Stop(Exception):
    """Ends a training from its progress, as Ctrl-C would."""


class NoTracker:
    def resume(self, history: History, *, is_current: Callable[[], bool]) -> None:
        pass

    def log(self, row: dict[str, object]) -> None:
        pass


@dataclass
class Steps:
    """A progress that calls `at[n]` after step n."""

    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)

    def start(self, description: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        if isinstance(step := facts.get("step"), int):
            self.done.append(step)
            self.at.get(step, lambda: None)()


def stop() -> None:
    raise Stop


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained; `run` runs it, or what is left of it."""

    model_folder: Path
    shards: Path
    lora: LoraConfig | None = LORA
    keep_last: int = 2

    def run(self, store_url: str, said: list[str], steps: Steps | None = None) -> Manifest:
        # 9 rows and 2 epochs in steps of 4 rows: 4, 4, 4, 4, 2. The third step lies across the end of the first epoch.
        train = TrainConfig(epochs=2, batch_size=4, micro_batch_size=2, lr=1e-2, warmup_ratio=0.2, lora=self.lora, seed=3)
        job = SFTJob(
            train_key=KEY,
            model_folder=self.model_folder,
            shards=PackedDataset(self.shards),
            train=train,
            checkpoint=CheckpointConfig(save_every=2, keep_last=self.keep_last),
            resources=ResourcesConfig(mode="local"),
        )
        return run_sft(job, store=open_store(store_url), tracker=NoTracker(), progress=steps or Steps(), say=said.append)


def write_shards(folder: Path) -> Path:
    return write_folder(folder, [packed_row(5, 4 + number % 3, seed=number) for number in range(9)], 2)


def outcome(store: Store, manifest: Manifest) -> dict[str, Any]:
    """What must not depend on how training got there: digests of weights, moments, settings, and the curve without clock times."""
    rows = [json.loads(line) for line in store.get(f"{manifest.prefix}/history.jsonl").splitlines()]
    curve = [{name: value for name, value in row.items() if name not in CLOCK_FIELDS} for row in rows]
    return {"curve": curve} | {entry.path: entry.sha256 for entry in manifest.files if not entry.volatile}
