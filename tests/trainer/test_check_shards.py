from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.store import open_store
from storage.transfer import upload_folder
from tests.sharding.shard_files import random_rows, write_folder
from twinkle_core.config import TrainConfig
from twinkle_core.errors import ConfigError
from twinkle_core.sharding import PackedDataset, ShardCache
from twinkle_core.trainer.run import check_shards
from twinkle_core.types import DocumentKind


@pytest.mark.parametrize("kind", DocumentKind)
def test_supervised_learning_takes_plain_documents_only(tmp_path: Path, kind: DocumentKind) -> None:
    folder = write_folder(tmp_path, random_rows(3), 3)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"kinds": sorted({"PLAIN", kind.name})}))
    if kind is DocumentKind.PLAIN:
        check_shards(PackedDataset(folder), TrainConfig())
        return
    with pytest.raises(ConfigError, match=rf"the shards hold {kind.name} documents, from which (dpo|kto|grpo|embedding training) learns"):
        check_shards(PackedDataset(folder), TrainConfig())


def test_a_shuffle_that_the_cache_cannot_hold_is_refused(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    files = upload_folder(store, write_folder(tmp_path / "shards", random_rows(20), 5), "p")
    shards = PackedDataset.open(store, "p", files, ShardCache(tmp_path / "cache", max(file.size for file in files)))
    with pytest.raises(ConfigError, match=r"raise resources.shard_cache_bytes, or lower train.shuffle_shards"):
        check_shards(shards, TrainConfig())
    check_shards(shards, TrainConfig(shuffle_shards=1))
    check_shards(shards, TrainConfig(shuffle=False))
