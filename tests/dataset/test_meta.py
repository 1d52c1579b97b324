import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.dataset import Dataset
from twinkle_core.dataset.meta import DatasetMeta, SourceRows
from twinkle_core.errors import ConfigError, DataError

ROWS = [{"prompt": str(number), "completion": "x"} for number in range(6)]


def prompts(meta: DatasetMeta) -> list[str]:
    return [row["prompt"] for _, row in SourceRows(meta).read()]


def streamed(meta: DatasetMeta) -> list[str]:
    return [row["prompt"] for _, row in SourceRows(meta).stream()]


@pytest.mark.parametrize(
    ("meta", "uri"),
    [
        (DatasetMeta("hf://org/name@main"), "hf://org/name@main?split=train"),
        (DatasetMeta("ms://org/name@v1", subset_name="math", split="test"), "ms://org/name@v1?subset=math&split=test"),
        (DatasetMeta("reasoning_gym://chain_sum?size=3&seed=1"), "reasoning_gym://chain_sum?size=3&seed=1"),
        (DatasetMeta("data/*.jsonl"), "data/*.jsonl"),
    ],
)
def test_the_address_of_a_source(meta: DatasetMeta, uri: str) -> None:
    assert meta.uri() == uri
    SourceRows(meta)  # opens it, which asks nobody yet


def test_a_hub_dataset_needs_a_revision() -> None:
    with pytest.raises(ConfigError, match="has no revision"):
        Dataset(DatasetMeta("hf://org/name"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "either dataset_id or data"),
        ({"dataset_id": "a.jsonl", "data": []}, "either dataset_id or data"),
        ({"dataset_id": "a.jsonl", "split": "test"}, "hf:// and ms:// datasets only"),
        ({"data": ROWS, "subset_name": "main"}, "hf:// and ms:// datasets only"),
        ({"dataset_id": "hf://a/b?split=test"}, "as subset_name and split"),
        ({"dataset_id": "a.jsonl", "data_slice": 5}, "range, a slice or row numbers"),
        ({"data": iter(ROWS)}, "read only once"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        DatasetMeta(**arguments)


@pytest.mark.parametrize(
    ("data_slice", "expected"),
    [(None, "012345"), (range(2), "01"), (range(1, 6, 2), "135"), (slice(1, 3), "12"), (slice(-2, None), "45"), ([4, 0, 4], "404")],
)
def test_rows_are_chosen_in_the_order_asked_for(data_slice: Any, expected: str) -> None:
    assert prompts(DatasetMeta(data=ROWS, data_slice=data_slice)) == list(expected)


@pytest.mark.parametrize("data_slice", [range(7), [6], slice(0, 7), [-1]])
def test_a_row_number_that_does_not_exist_is_refused(data_slice: Any) -> None:
    with pytest.raises(DataError, match=r"data_slice .*(row 6|-1|row 7)"):
        prompts(DatasetMeta(data=ROWS, data_slice=data_slice))
    with pytest.raises((DataError, ConfigError)):
        streamed(DatasetMeta(data=ROWS, data_slice=data_slice))


@given(
    st.one_of(st.none(), st.sets(st.integers(0, 5)).map(sorted), st.builds(slice, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)))
)
def test_a_stream_gives_what_reading_gives(data_slice: Any) -> None:
    meta = DatasetMeta(data=ROWS, data_slice=data_slice)
    assert streamed(meta) == prompts(meta)


@pytest.mark.parametrize("data_slice", [[2, 1], [1, 1], range(3, 0, -1), slice(None, None, -1), slice(-2, None)])
def test_a_stream_is_read_forwards_only(data_slice: Any) -> None:
    with pytest.raises(ConfigError, match="forwards only"):
        streamed(DatasetMeta(data=ROWS, data_slice=data_slice))


def made() -> Iterator[dict[str, str]]:
    yield from ROWS


def test_rows_in_memory_may_have_any_form() -> None:
    from datasets import Dataset as HubDataset

    columns = {key: [row[key] for row in ROWS] for key in ROWS[0]}
    for data in (ROWS, tuple(ROWS), columns, made, HubDataset.from_list(ROWS), HubDataset.from_list(ROWS).to_iterable_dataset()):
        rows = SourceRows(DatasetMeta(data=data))
        assert [row for _, row in rows.read()] == ROWS == [row for _, row in rows.stream()]
    assert str(rows.read()[2][0]) == "row 3"


@pytest.mark.parametrize(("data", "part"), [([ROWS[0], "text"], "row 2: a row is a dict"), ({"a": [1], "b": [1, 2]}, "differ in length")])
def test_what_are_no_rows_is_refused(data: Any, part: str) -> None:
    with pytest.raises(DataError, match=part):
        SourceRows(DatasetMeta(data=data)).read()


def test_files_are_read_with_their_places(tmp_path: Any) -> None:
    path = tmp_path / "sums[1].jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    places = [str(place) for place, _ in SourceRows(DatasetMeta(path, data_slice=range(2))).read()]
    assert places == ["sums[1].jsonl, line 1", "sums[1].jsonl, line 3"]
