"""Every format and compression gives the rows that were written, and names what is wrong with a file or a row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.preprocessor import source_files as write
from tests.preprocessor.source_files import COLUMNAR, PACK
from twinkle_core.config import SourceConfig
from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources import Place, columnar, json_document, open_source

Rows = list[dict[str, Any]]
IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)


def read(path: Path, refused: list[tuple[str, str]] | None = None) -> Rows:
    collect = None if refused is None else lambda place, reason: refused.append((str(place), reason))
    return [row for _, row in open_source(SourceConfig(name="s", uri=str(path))).rows(collect)]


def read_bytes(folder: Path, name: str, data: bytes, refused: list[tuple[str, str]] | None = None) -> Rows:
    (folder / name).write_bytes(data)
    return read(folder / name, refused)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_ROWS = st.lists(
    st.dictionaries(
        TEXT,
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)
STRING_ROWS = st.lists(st.fixed_dictionaries({"question": TEXT, "answer": TEXT}), min_size=1, max_size=6)


@pytest.mark.parametrize("ending", PACK)
@IN_ONE_FOLDER
@given(rows=JSON_ROWS)
def test_json_lines_and_arrays_give_the_rows_that_were_written(rows: Rows, ending: str, tmp_path: Path) -> None:
    for name, data in {"a.jsonl": write.as_jsonl(rows), "a.json": write.as_json(rows)}.items():
        found = read_bytes(tmp_path, name + ending, PACK[ending](data))
        assert json.dumps(found) == json.dumps(rows)  # key order and number types too


@pytest.mark.parametrize("ending", PACK)
@IN_ONE_FOLDER
@given(rows=STRING_ROWS)
def test_columns_of_text_give_the_rows_that_were_written(rows: Rows, ending: str, tmp_path: Path) -> None:
    assert read_bytes(tmp_path, "a.json" + ending, PACK[ending](write.as_columns(rows))) == rows
    unmarked = [{key: value.replace("\ufeff", "") for key, value in row.items()} for row in rows]  # a mark in mid-file is refused
    assert read_bytes(tmp_path, "a.csv" + ending, PACK[ending](write.as_csv(unmarked))) == unmarked


@pytest.mark.parametrize("ending", PACK)
@IN_ONE_FOLDER
@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"), max_size=8), min_size=1))
def test_each_line_of_a_text_file_is_a_row(lines: list[str], ending: str, tmp_path: Path) -> None:
    kept = [{"text": line} for line in lines if line.encode().strip()]
    data = PACK[ending]("\r\n".join(lines).encode())
    if kept:
        assert read_bytes(tmp_path, "a.txt" + ending, data) == kept
    else:
        with pytest.raises(DataError, match="no rows"):
            read_bytes(tmp_path, "a.txt" + ending, data)


ARROW_ROW = pa.struct(
    [
        ("n", pa.int64()),
        ("u", pa.uint64()),
        ("x", pa.float64()),
        ("t", pa.string()),
        ("big", pa.large_string()),
        ("ok", pa.bool_()),
        ("ids", pa.list_(pa.int32())),
        ("turns", pa.large_list(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("meta", pa.struct([("a", pa.string()), ("b", pa.list_(pa.float64()))])),
    ]  # fmt: skip
)
ARROW_ROWS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(-(2**63), 2**63 - 1),
            "u": st.integers(0, 2**64 - 1),
            "x": st.floats(allow_nan=False, allow_infinity=False),
            "t": TEXT,
            "big": TEXT,
            "ok": st.booleans(),
            "ids": st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=3),
            "turns": st.lists(st.fixed_dictionaries({"role": TEXT}, optional={"content": TEXT}), max_size=3),
            "meta": st.fixed_dictionaries({}, optional={"a": TEXT, "b": st.lists(st.none() | st.floats(-1, 1), max_size=2)}),
        },
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", COLUMNAR)
@IN_ONE_FOLDER
@given(rows=ARROW_ROWS)
def test_columnar_files_give_the_rows_that_were_written_without_keys_for_nulls(rows: Rows, kind: str, ending: str, tmp_path: Path) -> None:
    suffix, to_bytes = COLUMNAR[kind]
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(ARROW_ROW)))
    assert read_bytes(tmp_path, "a" + suffix + ending, PACK[ending](to_bytes(table))) == rows


@IN_ONE_FOLDER
@given(rows=JSON_ROWS, size=st.sampled_from([1, 2, 5, 17, 1 << 20]))
def test_arrays_are_read_alike_in_blocks_of_any_size(rows: Rows, size: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_document, "BLOCK_BYTES", size)
        found = read_bytes(tmp_path, "a.json", b"\xef\xbb\xbf" + write.as_json(rows) if size > 2 else write.as_json(rows))
    assert json.dumps(found) == json.dumps(rows)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_files_glued_together_are_read_and_cut_or_wrong_ones_are_refused(tmp_path: Path, ending: str) -> None:
    rows = [{"a": number} for number in range(2000)]
    packed = PACK[ending](write.as_jsonl(rows))
    assert read_bytes(tmp_path, "a.jsonl" + ending, packed + packed) == rows * 2
    for wrong in (packed[:-1], packed[: len(packed) // 2], write.as_jsonl(rows), packed + b"behind it"):
        refused: list[tuple[str, str]] = []
        with pytest.raises(DataError, match=rf"source 's', a\.jsonl{ending} is no whole"):
            read_bytes(tmp_path, "a.jsonl" + ending, wrong, refused)  # a callback does not make it right
        assert not refused


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'"text"', "holds an array of objects, or one object of arrays"),
        (b"12", "holds an array of objects, or one object of arrays"),
        (b'{"a": 1}', "the value of key 'a' is a int, not an array"),
        (b'{"version": [1], "data": {}}', "the value of key 'data' is a dict, not an array"),
        (b'{"a": [1, 2], "b": [1]}', r"the arrays have the lengths \{'a': 2, 'b': 1\}"),
        (b"{}", "an empty object"),
        (b'{"a": [1]}\n{"a": [2]}', r"name the file \.jsonl"),
        (b'[{"a": 1}, {"a": 2}', "expected ',' or ']' after row 2, got the end of the file"),
        (b'[{"a": 1}, {"a": 2', "ends inside the value that starts at byte offset 11"),
        (b'[{"a": "x]', "ends inside the value that starts at byte offset 1"),
        (b'[{"a": 1} {"a": 2}]', r"expected ',' or '\]' after row 1, got b'\{' at byte offset 10"),
        (b'[{"a": 1},]', "a comma after the last row"),
        (b'[,{"a": 1}]', "expected row 1 at byte offset 1"),
        (b'[{"a": 1}] x', "nothing behind it; got b'x' at byte offset 11"),
        (b"[]", "no rows"),
        (b" \n", "no rows"),
        (b"", "no rows"),
    ],
)
def test_a_json_file_of_another_form_is_refused_as_a_whole(tmp_path: Path, data: bytes, message: str) -> None:
    refused: list[tuple[str, str]] = []
    with pytest.raises(DataError, match=message) as caught:
        read_bytes(tmp_path, "a.json", data, refused)
    assert str(caught.value).startswith("source 's'") and "a.json" in str(caught.value)


def test_a_bad_item_of_an_array_is_refused_by_its_number_and_the_rest_is_read(tmp_path: Path) -> None:
    data = b'[{"a": 1}, 7, {"a": NaN}, "x]", [{"a": 2}], {"a": "\\ud83d"}, {"a": "\xe9"}, null, {"a": 100000000000000000000}]'
    refused: list[tuple[str, str]] = []
    assert read_bytes(tmp_path, "a.json", data, refused) == [{"a": 1}, {"a": 10**20}]
    assert [place for place, _ in refused] == [f"a.json, row {number}" for number in range(2, 9)]
    assert f"byte offset {data.index(bytes([0xE9]))}" in refused[5][1]
    with pytest.raises(DataError, match=r"source 's', a\.json, row 2: a row is an object, got int"):
        read_bytes(tmp_path, "a.json", data)


def test_csv_values_stay_text_and_rows_are_found_at_their_first_line(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfid,text\r\n007,"two\nlines, ""quoted"""\r\n\r\n1e5,\r\n,nan\r\n'
    (tmp_path / "a.csv").write_bytes(data)
    rows = list(open_source(SourceConfig(name="s", uri=str(tmp_path / "a.csv"))).rows())
    assert [row for _, row in rows] == [
        {"id": "007", "text": 'two\nlines, "quoted"'}, {"id": "1e5", "text": ""}, {"id": "", "text": "nan"}]  # fmt: skip
    assert [place for place, _ in rows] == [Place("a.csv", "line", line) for line in (2, 5, 6)]


def test_bad_csv_rows_are_refused_by_line_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = [b"a,b", b"1,2", b"only one", b"1,2,3", b"caf\xe9,x", b'"q"uote,x', b"3,4", b"\xef\xbb\xbf5,6", b'7,"open']
    refused: list[tuple[str, str]] = []
    data = b"\n".join(lines)
    assert read_bytes(tmp_path, "a.csv", data, refused) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert [place for place, _ in refused] == [f"a.csv, line {number}" for number in (3, 4, 5, 6, 8, 9)]
    reasons = [reason for _, reason in refused]
    assert "1 values under a header of 2" in reasons[0] and "3 values" in reasons[1]
    assert f"byte 0xe9 at byte offset {data.index(bytes([0xE9]))}" in reasons[2]
    assert "not valid CSV" in reasons[3] and "byte order mark" in reasons[4] and "not valid CSV" in reasons[5]


@pytest.mark.parametrize(("data", "message"), [(b"a,b,a\n1,2,3", "names the column 'a' twice"), (b"caf\xe9\n1", "0xe9 at byte offset 3"),
                                               (b"a,b\n", "no rows"), (b"", "no rows")])  # fmt: skip
def test_a_csv_file_without_a_header_of_its_own_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_bytes(tmp_path, "a.csv", data, [])


def test_a_csv_value_may_be_longer_than_the_csv_modules_own_limit(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, "a.csv", b"text\n" + b"x" * 3_000_000) == [{"text": "x" * 3_000_000}]


def test_text_lines_of_another_encoding_and_marks_in_mid_file_are_refused(tmp_path: Path) -> None:
    refused: list[tuple[str, str]] = []
    data = b"\xef\xbb\xbfone\ncaf\xe9\n\xef\xbb\xbfthree\nfour"
    assert read_bytes(tmp_path, "a.txt", data, refused) == [
        {"text": "one"},
        {"text": "four"},
    ]
    assert [place for place, _ in refused] == ["a.txt, line 2", "a.txt, line 3"]
    assert "byte offset 10" in refused[0][1]


TOOLS: Rows = [
    {"tools": [{"name": "add", "parameters": {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}}]},
    {"tools": [{"name": "pick", "parameters": {"properties": {"colour": {"type": "string", "enum": ["red"]}}}}]},
    {"tools": [{"name": "now", "parameters": {"properties": {}}}]},
]


@pytest.mark.parametrize("kind", COLUMNAR)
def test_tools_that_arrow_merged_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    suffix, to_bytes = COLUMNAR[kind]
    table = pa.Table.from_pylist(TOOLS)
    assert table.to_pylist() != TOOLS  # the case occurs: Arrow gives each tool the others' keys
    assert read_bytes(tmp_path, "a" + suffix, to_bytes(table)) == TOOLS


@pytest.mark.parametrize("kind", COLUMNAR)
def test_a_column_of_json_keeps_nulls_mixed_types_and_long_integers(kind: str, tmp_path: Path) -> None:
    suffix, to_bytes = COLUMNAR[kind]
    values = [{"default": None, "n": 10**30}, ["a", 1, {"b": []}], "text", None]
    texts = [json.dumps(value) if value is not None else None for value in values]
    table = pa.table({"n": [1, 2, 3, 4], "arguments": pa.array(texts, pa.json_())})
    expected = [{"n": number, "arguments": value} for number, value in enumerate(values[:3], 1)]
    assert read_bytes(tmp_path, "a" + suffix, to_bytes(table)) == [*expected, {"n": 4}]
    broken = pa.table({"arguments": pa.array(['{"a": 1}', "{"], pa.json_())})
    refused: list[tuple[str, str]] = []
    assert read_bytes(tmp_path, "a" + suffix, to_bytes(broken), refused) == [{"arguments": {"a": 1}}]
    assert refused[0][0] == f"a{suffix}, row 2" and "column 'arguments': not valid JSON" in refused[0][1]


@pytest.mark.parametrize("kind", COLUMNAR)
def test_types_that_json_lacks_become_text_and_the_rest_stays_what_it_is(kind: str, tmp_path: Path) -> None:
    suffix, to_bytes = COLUMNAR[kind]
    table = pa.table(
        {
            "when": pa.array([datetime(2024, 2, 29, 12, 30, 0, 5, tzinfo=UTC)], pa.timestamp("ns", "UTC")),
            "day": [date(2024, 2, 29)],
            "price": pa.array([Decimal("12345678901234567890.10")], pa.decimal128(38, 2)),
            "label": pa.array(["yes"]).dictionary_encode(),
            "png": pa.array([b"\x89PNG\xff"]),
            "pair": pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
            "half": pa.array(np.array([1.5], dtype=np.float16)),
            "map": pa.array([[("k", None), ("l", 2)]], pa.map_(pa.string(), pa.int64())),
            "dates": [[{"d": date(2024, 1, 1)}]],
        }
    )
    assert read_bytes(tmp_path, "a" + suffix, to_bytes(table)) == [
        {"when": "2024-02-29 12:30:00.000005000Z", "day": "2024-02-29", "price": "12345678901234567890.10", "label": "yes",
         "png": b"\x89PNG\xff", "pair": [1, 2], "half": 1.5, "map": {"k": None, "l": 2}, "dates": [{"d": "2024-01-01"}]}]  # fmt: skip


@pytest.mark.parametrize("write_ipc", [write.as_arrow_file, write.as_arrow_stream])
def test_arrays_of_every_kind_of_list_are_the_same(write_ipc: Callable[[pa.Table], bytes], tmp_path: Path) -> None:
    values, types = [[1, 2], None, [], [3, 4]], [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
    table = pa.table({kind.__name__: pa.array(values, kind(pa.int32())) for kind in types} | {"n": [0, 1, 2, 3]})
    assert read_bytes(tmp_path, "a.arrow", write_ipc(table)) == [
        {**{kind.__name__: value for kind in types if value is not None}, "n": number} for number, value in enumerate(values)
    ]


@pytest.mark.parametrize("kind", COLUMNAR)
def test_bad_rows_of_columnar_files_are_refused_by_number_and_the_rest_is_read(kind: str, tmp_path: Path) -> None:
    suffix, to_bytes = COLUMNAR[kind]
    offsets = np.arange(5, dtype=np.int32)
    not_utf8 = pa.StringArray.from_buffers(4, pa.py_buffer(offsets), pa.py_buffer(b"ab\xffd"))
    table = pa.table({"t": not_utf8, "x": [[1.0], [math.nan, 2.0], [0.5], [None]]})
    refused: list[tuple[str, str]] = []
    assert read_bytes(tmp_path, "a" + suffix, to_bytes(table), refused) == [{"t": "a", "x": [1.0]}, {"t": "d", "x": [None]}]
    assert [place for place, _ in refused] == [f"a{suffix}, row 2", f"a{suffix}, row 3"]
    assert "column 'x': a number that is NaN" in refused[0][1] and "UTF8" in refused[1][1]


@pytest.mark.parametrize("kind", COLUMNAR)
def test_damaged_columnar_files_are_named(kind: str, tmp_path: Path) -> None:
    suffix, to_bytes = COLUMNAR[kind]
    data = to_bytes(pa.table({"t": [str(number) * 50 for number in range(100)]}))
    for wrong in (data[: len(data) // 2], b"no such format" * 10):
        with pytest.raises(DataError, match=rf"source 's', a\{suffix} cannot be read as"):
            read_bytes(tmp_path, "a" + suffix, wrong, [])
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    if kind != "parquet":
        with pytest.raises(DataError, match="names the column 'a' twice"):
            read_bytes(tmp_path, "a" + suffix, to_bytes(twice), [])


@pytest.mark.parametrize("to_bytes", [write.as_parquet, write.as_arrow_file])
def test_large_batches_are_taken_in_parts(to_bytes: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{number} " * 200} for number in range(50)]
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / ("a.parquet" if to_bytes is write.as_parquet else "a.arrow")
    path.write_bytes(to_bytes(pa.Table.from_pylist(rows), 50))
    sizes: list[int] = []
    real = columnar._plain
    monkeypatch.setattr(columnar, "BATCH_BYTES", 4000)

    def plain(batch: pa.RecordBatch) -> Any:
        sizes.append(batch.num_rows)
        return real(batch)

    monkeypatch.setattr(columnar, "_plain", plain)
    assert read(path) == rows
    assert sum(sizes) == 50 and max(sizes) <= 10


def test_gzip_is_seen_by_the_ending_in_any_case(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, "A.JSONL.GZ", gzip.compress(b'{"a": 1}')) == [{"a": 1}]


TABLE = pa.table({"a": [1]})
PACKED = {
    "gzip": (write.PACK[".gz"](b'{"a": 1}\n'), r"is a gzip file: give it a name that ends in \.gz"),
    "zstd": (write.PACK[".zst"](b'{"a": 1}\n'), r"is a zstd file: give it a name that ends in \.zst"),
    "bzip2": (bz2.compress(b'{"a": 1}\n'), "is a bzip2 file: unpack it"),
    "xz": (lzma.compress(b'{"a": 1}\n'), "is an xz file: unpack it"),
    "Parquet": (write.as_parquet(TABLE), r"is a Parquet file: give it a name that ends in \.parquet"),
    "Arrow": (write.as_arrow_file(TABLE), r"is an Arrow file: give it a name that ends in \.arrow"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow", "a.jsonl.gz", "a.parquet.gz"])
@pytest.mark.parametrize("packed", PACKED)
def test_bytes_of_another_type_than_the_name_says_are_called_what_they_are(name: str, packed: str, tmp_path: Path) -> None:
    data, told = PACKED[packed]
    data, inside = (gzip.compress(data), "unpacked, ") if name.endswith(".gz") else (data, "")
    if packed.lower() in name:
        assert read_bytes(tmp_path, name, data) == [{"a": 1}]
        return
    refused: list[tuple[str, str]] = []
    with pytest.raises(DataError, match=f"source 's', {inside}{name} {told}"):
        read_bytes(tmp_path, name, data, refused)
    assert refused == [], "no bad row that could be skipped"


def test_text_that_starts_like_another_type_is_text(tmp_path: Path) -> None:
    for start in (b"BZh9 is no size", b"PAR1 is a golf score", b"PK is initials", b"ARROW1"):
        assert read_bytes(tmp_path, "a.txt", start + b"\n") == [{"text": start.decode()}]
