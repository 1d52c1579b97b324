import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dataset.chats import chats, plain
from twinkle_core.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle_core.errors import ConfigError, DataError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
ROWS = [
    {"query": 'a \u2028 b\n"c"', "response": "ü", "n": 10**30},
    {"query": "?", "response": "", "tools": [TOOL]},
    {"query": "!", "response": "x", "tools": [{"type": "function", "function": {"name": "sub"}}]},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_saved_rows_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    for cls in (Dataset, LazyDataset, IterableDataset):
        cls(DatasetMeta(data=ROWS)).save_as(tmp_path / "folder" / name)
        assert list(Dataset(DatasetMeta(tmp_path / "folder" / name))) == ROWS
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [name]


def test_csv_has_a_column_for_each_key_of_any_row(tmp_path: Path) -> None:
    Dataset(DatasetMeta(data=ROWS)).save_as(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["query", "response", "n", "tools"]
    assert lines[0] == [ROWS[0]["query"], "ü", str(10**30), ""]
    assert json.loads(lines[1][3]) == [TOOL]


VALUES = st.one_of(st.none(), st.text(max_size=5), st.lists(st.integers(-(2**40), 2**40), max_size=3))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, min_size=1), min_size=1, max_size=6))
def test_parquet_holds_exactly_the_rows_or_refuses_them(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "rows.parquet"
    path.unlink(missing_ok=True)
    saved, reason = True, "save them as jsonl"
    try:
        Dataset(DatasetMeta(data=rows)).save_as(path)
    except DataError as error:
        saved, reason = False, str(error)
    assert reason.endswith("save them as jsonl")
    assert path.exists() == saved
    if not saved:
        return
    import pyarrow.parquet as parquet

    columns = {key for row in rows for key in row}
    assert parquet.read_table(path).to_pylist() == [{key: row.get(key) for key in columns} for row in rows]


def test_parquet_does_not_merge_tools(tmp_path: Path) -> None:
    conversations = Dataset(DatasetMeta(data=chats([1, 2])))
    conversations.save_as(tmp_path / "rows.parquet")
    assert list(Dataset(DatasetMeta(tmp_path / "rows.parquet"))) == chats([1, 2])
    with pytest.raises(DataError, match="Arrow would change 'tools'"):
        Dataset(DatasetMeta(data=ROWS[1:][::-1])).save_as(tmp_path / "tools.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_features_are_saved_as_numbers(template: Any, tmp_path: Path) -> None:
    dataset = Dataset(DatasetMeta(data=chats([1, 2])))
    dataset.set_template(template)
    dataset.encode()
    dataset.save_as(tmp_path / "features.parquet")
    dataset.save_as(tmp_path / "features", format="jsonl")
    lines = [json.loads(line) for line in (tmp_path / "features").read_text().splitlines()]
    assert lines == plain(dataset) == list(Dataset(DatasetMeta(tmp_path / "features.parquet")))


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    dataset = Dataset(DatasetMeta(data=[{"a": 1}, {"a": {1, 2}}]))
    with pytest.raises(DataError, match="row 1 cannot be saved: set is no JSON value"):
        dataset.save_as(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="'xlsx' is not one of jsonl, json, csv, parquet"):
        dataset.save_as(tmp_path / "rows.xlsx")
    assert not list(tmp_path.iterdir())


def test_the_rows_of_a_training_loop_are_not_saved_by_themselves(tmp_path: Path) -> None:
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.save_as(tmp_path / "rows.jsonl", batch_size=1, mode="immediate")
    with pytest.raises(ConfigError, match="no mode 'training', only 'immediate'"):
        dataset.save_as(tmp_path / "other.jsonl", mode="training")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
