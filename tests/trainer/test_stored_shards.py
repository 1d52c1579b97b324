"""Where the shards lie never changes what is learnt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from storage.transfer import upload_folder
from tests.model.tiny_models import packed_row
from tests.sharding.shard_files import write_folder
from twinkle_core.config import CheckpointConfig, LoraConfig, ResourcesConfig, TrainConfig
from twinkle_core.sharding import PackedDataset, ShardCache
from twinkle_core.trainer.run import SFTJob, run_sft
from twinkle_core.trainer.sft import CLOCK_FIELDS, History
from twinkle_core.types import NoProgress


class NoTracker:
    def resume(self, history: History, *, is_current: Callable[[], bool]) -> None:
        pass

    def log(self, row: dict[str, object]) -> None:
        pass


def trained(shards: PackedDataset, model_folder: Path, store_url: str, said: list[str]) -> list[dict[str, Any]]:
    """The history of a fine-tune of two epochs, without the clock's fields, and the digests of its last checkpoint."""
    job = SFTJob(
        train_key="0" * 64,
        model_folder=model_folder,
        shards=shards,
        train=TrainConfig(epochs=2, batch_size=4, lr=1e-2, lora=LoraConfig(rank=4, dropout=0.1), shuffle_shards=2),
        checkpoint=CheckpointConfig(save_every=2),
        resources=ResourcesConfig(mode="local"),
    )
    store = open_store(store_url)
    last = run_sft(job, store=store, tracker=NoTracker(), progress=NoProgress(), say=said.append)
    history = [json.loads(line) for line in store.get(f"{last.prefix}/history.jsonl").decode().splitlines()]
    rows = [{name: value for name, value in row.items() if name not in CLOCK_FIELDS} for row in history]
    return [*rows, {file.path: file.sha256 for file in last.files if file.path.endswith(".safetensors")}]


@pytest.mark.slow
def test_a_remote_store_and_a_local_folder_give_the_same_model(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "shards", [packed_row(5, 4 + number % 3, seed=number) for number in range(9)], 2)
    store = open_store(f"memory://{tmp_path.name}-shards")
    files = upload_folder(store, folder, "p")
    cache = ShardCache(tmp_path / "cache", 3 * max(entry.size for entry in files))
    said: list[str] = []
    remote = trained(PackedDataset.open(store, "p", files, cache), tiny_llama, f"memory://{tmp_path.name}-a", said)
    local = trained(PackedDataset(folder), tiny_llama, f"memory://{tmp_path.name}-b", said)
    assert len(local) == 6
    assert local[-1]
    assert remote == local
    assert not said
    assert trained(PackedDataset(folder), tiny_llama, f"memory://{tmp_path.name}-b", said) == local
    assert said == ["resuming after step 5 (18 rows consumed): no step remains"]
