from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from twinkle_core.config import PackingConfig, ShardConfig
from twinkle_core.errors import DataError
from twinkle_core.packing import plan
from twinkle_core.sharding import EncodedDataset, PackedDataset, write_shards
from twinkle_core.types import IGNORE, DocumentKind, EncodedSample, NoProgress

N = 700
SAMPLE_SCHEMA = pa.schema(
    [
        ("input_ids", pa.large_list(pa.int32())), ("labels", pa.large_list(pa.int32())), ("seq_lens", pa.list_(pa.int32())),
        ("kinds", pa.list_(pa.int8())), ("loss_weights", pa.large_list(pa.float32())), ("row", pa.int64()),
    ]
)  # fmt: skip


def random_sample(rng: np.random.Generator) -> dict[str, Any]:
    """A conversation, one with weights, or a preference pair."""
    lengths = rng.integers(2, 20, size=2).tolist() if rng.random() < 0.3 else [int(rng.integers(2, 40))]
    ids = rng.integers(0, 1000, size=sum(lengths)).tolist()
    labels: list[int] = []
    for length in lengths:
        document = ids[len(labels) : len(labels) + length]
        labels += [IGNORE, *document[2:], IGNORE]
    chosen = [DocumentKind.CHOSEN, DocumentKind.REJECTED] if len(lengths) == 2 else [DocumentKind.PLAIN]
    weights = rng.choice([0.0, 0.25, 1.0, 2.0], size=sum(lengths)).tolist() if rng.random() < 0.1 else None
    return {"input_ids": ids, "labels": labels, "seq_lens": lengths, "kinds": [int(kind) for kind in chosen], "loss_weights": weights}


def write_samples(folder: Path, samples: list[dict[str, Any]], files: int = 3) -> Path:
    """As the encode stage would, over several files of several batches."""
    folder.mkdir(parents=True)
    rows = [{**sample, "row": number} for number, sample in enumerate(samples)]
    size = -(-len(rows) // files)
    for number in range(files):
        table = pa.Table.from_pylist(rows[number * size : (number + 1) * size], schema=SAMPLE_SCHEMA)
        with pa.ipc.new_file(str(folder / f"train-{number:05d}.arrow"), SAMPLE_SCHEMA) as writer:
            writer.write_table(table, max_chunksize=97)
    return folder


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    return write_samples(tmp_path / "encoded", [random_sample(rng) for _ in range(N)])


def build(encoded: Path, root: Path, algorithm: str, rows_per_shard: int) -> PackedDataset:
    for name in ("plan", "shards"):
        (root / name).mkdir(parents=True)
    report = plan(encoded, PackingConfig(row_length=64, algorithm=algorithm), root / "plan", NoProgress())  # type: ignore[arg-type]
    index = write_shards(encoded, root / "plan", ShardConfig(rows_per_shard=rows_per_shard), root / "shards", NoProgress())
    assert report["documents"] == index["num_documents"] > N
    assert report["tokens"] == index["num_tokens"]
    return PackedDataset(root / "shards")


def pieces(row: Any) -> list[tuple[int, slice, slice]]:
    """(sample, its tokens, its documents) of each sample of a packed row."""
    ends = np.cumsum(row.seq_lens)
    first = np.flatnonzero(np.diff(row.sample_ids, prepend=-1))
    last = [*first[1:], len(row.sample_ids)]
    return [
        (int(row.sample_ids[a]), slice(int(ends[a] - row.seq_lens[a]), int(ends[b - 1])), slice(int(a), int(b)))
        for a, b in zip(first, last, strict=True)
    ]


@pytest.mark.parametrize(("algorithm", "rows_per_shard"), [("best_fit_decreasing", 50), ("none", 4096), ("none", 1)])
def test_every_sample_comes_back_once_and_whole(encoded: Path, tmp_path: Path, algorithm: str, rows_per_shard: int) -> None:
    source, packed = EncodedDataset(encoded), build(encoded, tmp_path / "out", algorithm, rows_per_shard)
    seen: list[int] = []
    num_mixed = 0
    for i in range(len(packed)):
        row = packed[i]
        assert len(row.input_ids) <= 64
        inside = [source[number] for number, _, _ in pieces(row)]
        for (number, tokens, documents), sample in zip(pieces(row), inside, strict=True):
            seen.append(number)
            assert row.input_ids[tokens].tolist() == sample.input_ids.tolist()
            assert row.labels[tokens].tolist() == sample.labels.tolist()
            assert row.seq_lens[documents].tolist() == sample.seq_lens.tolist()
            assert row.kinds[documents].tolist() == sample.kinds.tolist()
            weights = np.ones(len(sample.input_ids)) if sample.loss_weights is None else sample.loss_weights
            if row.loss_weights is None:
                assert sample.loss_weights is None
            else:
                assert row.loss_weights[tokens].tolist() == weights.tolist()
        num_mixed += len({sample.loss_weights is None for sample in inside}) == 2
        check_counts(packed, i, inside)
    assert sorted(seen) == list(range(N))
    assert (num_mixed > 5) == (algorithm != "none")
    assert packed.kinds == {DocumentKind.PLAIN, DocumentKind.CHOSEN, DocumentKind.REJECTED}
    assert len(packed.index["shards"]) == -(-len(packed) // rows_per_shard)
    with pytest.raises(IndexError):
        packed[len(packed)]


def check_counts(packed: PackedDataset, i: int, inside: list[EncodedSample]) -> None:
    assert packed.num_tokens[i] == sum(len(sample.input_ids) for sample in inside)
    assert packed.num_loss_tokens[i] == sum(sample.num_loss_tokens for sample in inside)
    assert packed.num_documents[i] == sum(len(sample.seq_lens) for sample in inside)
    assert packed.loss_weight[i] == pytest.approx(sum(sample.loss_weight for sample in inside), rel=1e-12)
    assert packed.loss_weight[i] == pytest.approx(packed[i].loss_weight, rel=1e-12)


def test_the_shard_size_changes_no_row(encoded: Path, tmp_path: Path) -> None:
    one, other = (build(encoded, tmp_path / str(size), "best_fit_decreasing", size) for size in (7, 4096))
    assert len(one) == len(other) > 7
    assert all(one[i].input_ids.tolist() == other[i].input_ids.tolist() for i in range(len(one)))


def test_how_samples_lie_in_files_changes_no_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    samples = [random_sample(rng) for _ in range(300)]
    one, other = (build2(write_samples(tmp_path / f"in{files}", samples, files), tmp_path / f"out{files}") for files in (1, 4))
    names = sorted(path.name for path in one.iterdir())
    assert len(names) > 3
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def build2(encoded: Path, out: Path) -> Path:
    out.mkdir()
    plan(encoded, PackingConfig(row_length=64), encoded, NoProgress())
    write_shards(encoded, encoded, ShardConfig(rows_per_shard=20), out, NoProgress())
    return out


def test_the_index_tells_sizes_digests_and_sums(encoded: Path, tmp_path: Path) -> None:
    packed = build(encoded, tmp_path / "out", "best_fit_decreasing", 50)
    folder, index = tmp_path / "out" / "shards", packed.index
    for entry in [*index["shards"], index["rows"]]:
        data = (folder / entry["file"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert sum(shard["rows"] for shard in index["shards"]) == index["num_rows"] == len(packed)
    assert index["num_tokens"] == packed.num_tokens.sum()
    assert index["num_loss_tokens"] == packed.num_loss_tokens.sum()
    assert index["longest_row_tokens"] == packed.num_tokens.max()
    assert index["kinds"] == ["CHOSEN", "PLAIN", "REJECTED"]


def test_columns_have_the_promised_types(encoded: Path, tmp_path: Path) -> None:
    build(encoded, tmp_path / "out", "best_fit_decreasing", 50)
    with pa.ipc.open_file(str(tmp_path / "out" / "shards" / "shard-00000.arrow")) as reader:
        assert {field.name: str(field.type) for field in reader.schema} == {
            "input_ids": "large_list<item: int32>", "labels": "large_list<item: int32>", "seq_lens": "list<item: int32>",
            "sample_ids": "list<item: int64>", "kinds": "list<item: int8>", "loss_weights": "large_list<item: float>",
        }  # fmt: skip


def test_long_rows_are_gathered_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_core.sharding.writer.BATCH_TOKENS", 100)
    rng = np.random.default_rng(1)
    folder = build2(write_samples(tmp_path / "in", [random_sample(rng) for _ in range(200)]), tmp_path / "out")
    with pa.ipc.open_file(str(folder / "shard-00000.arrow")) as reader:
        sizes = [len(reader.get_batch(number).column("input_ids").values) for number in range(reader.num_record_batches)]
    assert max(sizes) <= 100
    assert len(sizes) > 5
    with pa.ipc.open_file(str(folder / "shard-00000.arrow")) as reader:
        table = reader.read_all()
    monkeypatch.undo()
    with pa.ipc.open_file(str(build2(tmp_path / "in", tmp_path / "other") / "shard-00000.arrow")) as reader:
        assert table.to_pylist() == reader.read_all().to_pylist()


class Parts:
    def __init__(self, kept: dict[str, dict[str, Any]]) -> None:
        self.kept, self.made = kept, list[str]()

    def finished(self, name: str) -> dict[str, Any] | None:
        return self.kept.get(name)

    def add(self, path: Path, facts: dict[str, Any]) -> None:
        self.made.append(path.name)
        self.kept[path.name] = json.loads(json.dumps(facts))


def test_finished_shards_are_not_made_again(encoded: Path, tmp_path: Path) -> None:
    whole = build(encoded, tmp_path / "whole", "best_fit_decreasing", 50)
    facts = {shard["file"]: {name: shard[name] for name in ("rows", "bytes", "sha256")} for shard in whole.index["shards"]}
    names = list(facts)
    assert len(names) > 4
    parts = Parts({name: facts[name] for name in names[:3]})
    (tmp_path / "rest").mkdir()
    index = write_shards(encoded, tmp_path / "whole" / "plan", ShardConfig(rows_per_shard=50), tmp_path / "rest", NoProgress(), parts=parts)
    assert parts.made == names[3:]
    assert index == whole.index
    made = sorted(path.name for path in (tmp_path / "rest").iterdir())
    assert made == sorted([*names[3:], "index.json", "rows.arrow"])
    assert all((tmp_path / "rest" / name).read_bytes() == (tmp_path / "whole" / "shards" / name).read_bytes() for name in made)


def test_a_plan_that_loses_or_doubles_a_sample_is_refused(encoded: Path, tmp_path: Path) -> None:
    for rows in ([list(range(N - 1))], [list(range(N)), [5]], [[*range(N - 1), N]], [list(range(N)), []]):
        table = pa.table({"rows": pa.array(rows, pa.large_list(pa.int64()))})
        with pa.ipc.new_file(str(tmp_path / "plan.arrow"), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match="pack again"):
            write_shards(encoded, tmp_path, ShardConfig(), tmp_path, NoProgress())


def test_samples_that_are_not_whole_are_refused(encoded: Path, tmp_path: Path) -> None:
    plan(encoded, PackingConfig(row_length=64), tmp_path, NoProgress())
    path = encoded / "train-00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(DataError, match=r"train-00001.arrow is not a whole Arrow file"):
        write_shards(encoded, tmp_path, ShardConfig(), tmp_path, NoProgress())
    path.unlink()
    with pytest.raises(DataError, match=r"no train-00001.arrow"):
        write_shards(encoded, tmp_path, ShardConfig(), tmp_path, NoProgress())


def test_a_sample_longer_than_a_row_stops_the_plan(encoded: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not fit a row of 1 to 8"):
        plan(encoded, PackingConfig(row_length=8, algorithm="none"), tmp_path, NoProgress())
