from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.sharding.shard_files import IDS, assert_same, facts, random_rows, write_folder
from twinkle_core.errors import DataError
from twinkle_core.sharding import EncodedDataset, PackedDataset
from twinkle_core.sharding import columns as columns_module
from twinkle_core.sharding.columns import ListColumns
from twinkle_core.types import DocumentKind, EncodedSample


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize(("rows_per_shard", "rows_per_batch"), [(7, 3), (50, 50), (1, 1)])
def test_every_row_comes_back(tmp_path: Path, compression: str | None, rows_per_shard: int, rows_per_batch: int) -> None:
    rows = random_rows(23)
    packed = PackedDataset(write_folder(tmp_path, rows, rows_per_shard, compression=compression, rows_per_batch=rows_per_batch))
    assert len(packed) == 23
    for number in np.random.default_rng(0).permutation(46) % 23:
        assert_same(packed[int(number)], rows[number])
    assert packed.num_tokens.tolist() == [len(row.input_ids) for row in rows]
    assert packed.num_loss_tokens.tolist() == [row.num_loss_tokens for row in rows]
    assert packed.num_documents.tolist() == [len(row.seq_lens) for row in rows]
    assert packed.loss_weight.tolist() == [row.loss_weight for row in rows]
    assert sum(packed.shard_rows) == 23
    assert packed.kinds == {DocumentKind.PLAIN}
    for outside in (23, -1):
        with pytest.raises(IndexError):
            packed[outside]


def test_values_of_an_uncompressed_file_are_not_copied(tmp_path: Path) -> None:
    packed = PackedDataset(write_folder(tmp_path, random_rows(9), 4))
    row = packed[0]
    assert not row.input_ids.flags.writeable
    assert row.input_ids.__array_interface__["data"] == packed[0].input_ids.__array_interface__["data"]
    for path in tmp_path.iterdir():
        path.unlink()
    assert_same(packed[0], random_rows(9)[0])


def test_decoded_batches_are_kept_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(60, tokens=100)
    folder = write_folder(tmp_path, rows, 30, compression="lz4", rows_per_batch=5)
    monkeypatch.setattr(columns_module, "DECODED_BYTES", 8000)
    names = ("input_ids", "loss_weights", "seq_lens")
    lists = ListColumns(sorted(folder.glob("shard-*")), names)
    numbers = (np.random.default_rng(1).permutation(600) % 60).tolist()
    most = 0
    with ThreadPoolExecutor(4) as pool:
        for number, found in zip(numbers, pool.map(lists.row, numbers), strict=True):
            np.testing.assert_array_equal(found[0], rows[number].input_ids)
            assert (found[1] is None) == (rows[number].loss_weights is None)
            most = max(most, lists._decoded_bytes)
    one_batch = 5 * 3 * 100 * 8
    assert 0 < most <= 8000 + one_batch  # on top for a moment; all batches have more than 35,000
    assert lists.lengths("input_ids").tolist() == [len(row.input_ids) for row in rows]
    assert lists.lengths("loss_weights").tolist() == [0 if row.loss_weights is None else len(row.input_ids) for row in rows]


def test_a_copied_data_set_reads_the_same(tmp_path: Path) -> None:
    packed = PackedDataset(write_folder(tmp_path, random_rows(5), 2))
    assert_same(copy(packed)[3], packed[3])


def write_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | changes))


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "good", random_rows(10), 4)
    shards = json.loads((folder / "index.json").read_text())["shards"]
    write_index(folder, shards=shards[:-1])
    with pytest.raises(DataError, match=r"numbers of rows differ: .*'shards': 8"):
        PackedDataset(folder)
    write_index(folder, shards=[*shards[:2], shards[2] | {"rows": 1}, {"file": "shard-00003.arrow", "rows": 1, "bytes": 0}])
    with pytest.raises(DataError, match=r"shard-00003.arrow is missing"):
        PackedDataset(folder)
    write_index(folder, shards=[shards[0] | {"rows": 3}, shards[1] | {"rows": 5}, shards[2]])
    with pytest.raises(DataError, match=r"have \[4, 4, 2\] rows, the index \[3, 5, 2\]"):
        PackedDataset(folder)
    write_index(folder, shards=shards)
    cut = folder / "shard-00001.arrow"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"shard-00001.arrow has \d+ bytes, not the \d+"):
        PackedDataset(folder)
    write_index(folder, shards=[shards[0], facts(cut) | {"rows": 4}, shards[2]])
    with pytest.raises(DataError, match=r"shard-00001.arrow is not a whole Arrow file"):
        PackedDataset(folder)
    cut.write_bytes(b"")
    with pytest.raises(DataError, match=r"shard-00001.arrow is not a whole Arrow file"):
        ListColumns([cut], ("labels",))
    (folder / "rows.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"rows.arrow of the shards cannot be read"):
        PackedDataset(folder)
    (folder / "index.json").unlink()
    with pytest.raises(DataError, match="not whole"):
        PackedDataset(folder)


def test_a_missing_column_and_an_old_index_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_rows(4), 4)
    with pytest.raises(DataError, match=r"shard-00000.arrow has the columns .* but not \['pixels'\]"):
        ListColumns([folder / "shard-00000.arrow"], ("input_ids", "pixels"))
    (folder / "index.json").write_text('{"num_rows": 4, "shards": []}')
    with pytest.raises(DataError, match=r"lacks \['kinds'\]"):
        PackedDataset(folder)


def write_samples(path: Path, samples: list[EncodedSample], first_row: int) -> None:
    names = ("input_ids", "labels", "seq_lens", "kinds", "loss_weights")
    schema = pa.schema([*zip(names, (IDS, IDS, pa.list_(pa.int32()), pa.list_(pa.int8()), pa.large_list(pa.float32())), strict=True)])
    table = pa.table({name: [getattr(sample, name) for sample in samples] for name in names}, schema=schema)
    table = table.append_column("row", pa.array(range(first_row, first_row + len(samples)), pa.int64()))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        if samples:
            writer.write_table(table, max_chunksize=2)


def test_encoded_parts_are_one_data_set(tmp_path: Path) -> None:
    samples = [
        EncodedSample(
            input_ids=np.arange(number + 2, dtype=np.int32),
            labels=np.full(number + 2, -100, dtype=np.int32),
            seq_lens=np.array([1, number + 1], dtype=np.int32),
            kinds=np.array([DocumentKind.CHOSEN, DocumentKind.REJECTED], dtype=np.int8),
            loss_weights=np.ones(number + 2, dtype=np.float32) if number % 2 else None,
        )
        for number in range(7)
    ]
    write_samples(tmp_path / "train-00000.arrow", samples[:4], 0)
    write_samples(tmp_path / "train-00001.arrow", samples[4:], 100)
    write_samples(tmp_path / "held_out-00000.arrow", [], 0)
    train, held_out = EncodedDataset(tmp_path), EncodedDataset(tmp_path, "held_out")
    assert (len(train), len(held_out), held_out.rows()) == (7, 0, [])
    assert train.rows() == [0, 1, 2, 3, 100, 101, 102]
    assert train.num_tokens.tolist() == [2, 3, 4, 5, 6, 7, 8]
    for number, sample in enumerate(samples):
        found = copy(train)[number]
        assert found.input_ids.tolist() == sample.input_ids.tolist()
        assert found.seq_lens.tolist() == [1, number + 1]
        assert found.kinds.tolist() == [1, 2]
        assert (found.loss_weights is None) == (number % 2 == 0)
    (tmp_path / "train-00000.arrow").unlink()
    with pytest.raises(DataError, match=r"there is no train-00000.arrow"):
        EncodedDataset(tmp_path)
    with pytest.raises(DataError, match=r"there is no train-00000.arrow"):
        EncodedDataset(tmp_path / "elsewhere")
