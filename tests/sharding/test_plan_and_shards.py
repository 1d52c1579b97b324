from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from twinkle_core.config import PackingConfig, ShardConfig
from twinkle_core.errors import DataError
from twinkle_core.packing import plan
from twinkle_core.sharding import EncodedDataset, PackedDataset, write_shards
from twinkle_core.types import IGNORE, NoProgress

N = 700


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    folder = tmp_path / "encoded"
    folder.mkdir()
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, 1000, size=length).tolist() for length in rng.integers(2, 40, size=N)]
    labels = [[IGNORE, *row[2:], IGNORE] for row in ids]
    kind = pa.large_list(pa.int32())
    table = pa.table({"input_ids": pa.array(ids, kind), "labels": pa.array(labels, kind)})
    with pa.ipc.new_file(str(folder / "train.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=97)
    return folder


def build(encoded: Path, root: Path, algorithm: str, rows_per_shard: int) -> PackedDataset:
    for name in ("plan", "shards"):
        (root / name).mkdir(parents=True)
    report = plan(encoded, PackingConfig(row_length=64, algorithm=algorithm), root / "plan", NoProgress())  # type: ignore[arg-type]
    index = write_shards(encoded, root / "plan", ShardConfig(rows_per_shard=rows_per_shard), root / "shards", NoProgress())
    assert report["documents"] == index["num_documents"] == N
    assert report["tokens"] == index["num_tokens"]
    return PackedDataset(root / "shards")


@pytest.mark.parametrize(("algorithm", "rows_per_shard"), [("best_fit_decreasing", 50), ("none", 4096), ("none", 1)])
def test_every_document_comes_back_once_and_whole(encoded: Path, tmp_path: Path, algorithm: str, rows_per_shard: int) -> None:
    source, packed = EncodedDataset(encoded / "train.arrow"), build(encoded, tmp_path / "out", algorithm, rows_per_shard)
    seen: list[int] = []
    for i in range(len(packed)):
        row = packed[i]
        assert len(row.input_ids) <= 64
        assert packed.num_tokens[i] == len(row.input_ids)
        assert packed.num_loss_tokens[i] == (row.labels != IGNORE).sum()
        assert packed.num_documents[i] == len(row.seq_lens)
        ends = np.cumsum(row.seq_lens)
        for sample_id, start, end in zip(row.sample_ids, ends - row.seq_lens, ends, strict=True):
            assert row.input_ids[start:end].tolist() == source[int(sample_id)].input_ids.tolist()
            assert row.labels[start:end].tolist() == source[int(sample_id)].labels.tolist()
            assert row.labels[end - 1] == IGNORE
            seen.append(int(sample_id))
    assert sorted(seen) == list(range(N))
    assert len(packed.index["shards"]) == -(-len(packed) // rows_per_shard)
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_the_shard_size_changes_no_row(encoded: Path, tmp_path: Path) -> None:
    one, other = (build(encoded, tmp_path / str(size), "best_fit_decreasing", size) for size in (7, 4096))
    assert len(one) == len(other) > 7
    assert all(one[i].input_ids.tolist() == other[i].input_ids.tolist() for i in range(len(one)))


def test_same_input_gives_the_same_bytes(encoded: Path, tmp_path: Path) -> None:
    one, other = (build(encoded, tmp_path / name, "best_fit_decreasing", 50).folder for name in ("a", "b"))
    names = sorted(path.name for path in one.iterdir())
    assert len(names) > 3
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_columns_have_the_promised_types_and_values_are_not_copied(encoded: Path, tmp_path: Path) -> None:
    packed = build(encoded, tmp_path / "out", "best_fit_decreasing", 50)
    with pa.ipc.open_file(str(packed.folder / "shard-00000.arrow")) as reader:
        assert {field.name: str(field.type) for field in reader.schema} == {
            "input_ids": "large_list<item: int32>", "labels": "large_list<item: int32>",
            "seq_lens": "list<item: int32>", "sample_ids": "list<item: int64>",
        }  # fmt: skip
    assert packed[0].input_ids.base is not None
    assert not packed[0].input_ids.flags.writeable


def test_a_plan_that_loses_or_doubles_a_document_is_refused(encoded: Path, tmp_path: Path) -> None:
    for rows in ([list(range(N - 1))], [list(range(N)), [5]], [[*range(N - 1), N]]):
        table = pa.table({"rows": pa.array(rows, pa.list_(pa.int64()))})
        with pa.ipc.new_file(str(tmp_path / "plan.arrow"), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match="pack again"):
            write_shards(encoded, tmp_path, ShardConfig(), tmp_path, NoProgress())


def test_a_folder_that_is_not_whole_is_refused(encoded: Path, tmp_path: Path) -> None:
    folder = build(encoded, tmp_path / "out", "best_fit_decreasing", 50).folder
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "shards": index["shards"][:-1]}))
    with pytest.raises(DataError, match="not whole"):
        PackedDataset(folder)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "shard-00001.arrow").write_bytes((folder / "shard-00001.arrow").read_bytes()[:-100])
    with pytest.raises(DataError, match="shard-00001.arrow is not a whole Arrow file"):
        PackedDataset(folder)


def test_a_document_longer_than_a_row_stops_the_plan(encoded: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not fit a row of 1 to 8"):
        plan(encoded, PackingConfig(row_length=8, algorithm="none"), tmp_path, NoProgress())
