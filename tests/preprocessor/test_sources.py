"""JSON Lines, generated rows and lists: exact values, places, refusals, digests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.store import open_store
from twinkle_core.config import SourceConfig
from twinkle_core.dataset.sources import Place, RowsSource, open_source
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.sources import data_file as data_file_module
from twinkle_core.preprocessor.sources import lines as lines_module
from twinkle_core.preprocessor.sources import parse_json, row_problem

ROOT = Path(__file__).parents[2]
ROW = b'{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "A."}]}'
BOM = b"\xef\xbb\xbf"


def source(*uris: Path | str) -> Any:
    return open_source(SourceConfig(name="s", uri=str(uris[0]) if len(uris) == 1 else tuple(str(uri) for uri in uris)))


def rows_of(tmp_path: Path, data: bytes, name: str = "rows.jsonl") -> list[dict[str, Any]]:
    (tmp_path / name).write_bytes(data)
    return [row for _, row in source(tmp_path / name).rows()]


@pytest.mark.parametrize("data", [BOM + ROW + b"\n" + ROW, BOM + ROW + b"\r\n" + ROW + b"\r\n", b"\n" + ROW + b"\n \t\r\n\n" + ROW])
def test_bom_crlf_and_blank_lines_change_no_row(tmp_path: Path, data: bytes) -> None:
    assert rows_of(tmp_path, data) == [json.loads(ROW)] * 2


def test_a_record_ends_at_lf_only(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x7fe"
    data = json.dumps({"t": text}, ensure_ascii=False).encode() + b"\n" + ROW
    assert rows_of(tmp_path, data) == [{"t": text}, json.loads(ROW)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ROW + b"\n\n" + ROW + b"\n" + ROW[:-3], "line 4: not valid JSON"),
        (ROW + b"\n" + BOM + ROW, "line 2: a byte order mark in the middle"),
        (ROW + b'\n{"a": "caf\xe9"}', r"line 2: not UTF-8: byte 0xe9 at byte offset 100"),
        (BOM + ROW + b'\n{"a": "caf\xe9"}', r"line 2: not UTF-8: byte 0xe9 at byte offset 103"),
        ('{"a": 1}'.encode("utf-16"), "line 1: not UTF-8: byte 0xff at byte offset 0"),
        (ROW + b'\n{"a": "cut \\ud83d"}', "line 2: half of a surrogate pair"),
        (ROW + b'\n{"a": NaN}', "line 2: not valid JSON: NaN"),
        (ROW + b'\n{"a": -Infinity}', "line 2: not valid JSON: -Infinity"),
        (ROW + b'\n{"a": 1e999}', "line 2: not valid JSON: 1e999 is past the range"),
        (ROW + b"\n[1]", "line 2: a row is an object, got list"),
        (ROW + b"\nnull", "line 2: a row is an object, got NoneType"),
        (ROW + b'\n{"a": 1} {"b": 2}', "line 2: not valid JSON"),
        (ROW + b"\n" + b'{"a": ' * 100_000, "line 2: not valid JSON"),
        (b"", "no rows"),
        (b"\n \n", "no rows"),
    ],
)
def test_what_cannot_be_read_is_named_with_source_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        rows_of(tmp_path, data)
    assert str(caught.value).startswith("source 's'")
    assert "rows.jsonl" in str(caught.value)


def test_bad_lines_go_to_the_callback_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROW + b"\n{\n" + BOM + ROW + b"\n" + ROW)
    refused: list[Place] = []
    kept = [place for place, _ in source(tmp_path / "rows.jsonl").rows(lambda place, reason: refused.append(place))]
    assert kept == [Place("rows.jsonl", "line", 1), Place("rows.jsonl", "line", 4)]
    assert [str(place) for place in refused] == ["rows.jsonl, line 2", "rows.jsonl, line 3"]


def test_integers_keep_all_their_digits(tmp_path: Path) -> None:
    ids = [9007199254740993, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30]
    assert [row["id"] for row in rows_of(tmp_path, b"\n".join(b'{"id": %d}' % i for i in ids))] == ids


def test_of_a_key_given_twice_the_last_value_counts_on_both_ways_of_reading(tmp_path: Path) -> None:
    assert rows_of(tmp_path, b'{"a": 1, "a": 2}\n{"a": 1, "a": 100000000000000000000}') == [{"a": 2}, {"a": 10**20}]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_fast_parser_gives_what_the_json_module_gives(value: Any, ascii_only: bool, indent: int | None) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", errors="replace")
    expected = json.loads(data)
    got = parse_json(data)
    assert got == expected
    assert json.dumps(got) == json.dumps(expected)  # 1, 1.0 and True are equal, but not the same


@given(st.text(st.characters(codec=None), max_size=8))
def test_half_pairs_are_refused_and_whole_ones_are_not(text: str) -> None:
    is_half = any(0xD800 <= ord(letter) < 0xE000 for letter in json.loads(json.dumps(text)))
    assert (row_problem({"t": parse_json(json.dumps(text).encode())}) is not None) == is_half


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_rows_do_not_depend_on_the_size_of_the_blocks(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", block)
    data = BOM + ROW + b"\n\n" + b'{"a": %d}' % 10**25 + b'\r\n{"a": "\xff"}\n' + ROW
    (tmp_path / "rows.jsonl").write_bytes(data)
    refused: list[tuple[int, str]] = []
    found = [
        (place.number, row) for place, row in source(tmp_path / "rows.jsonl").rows(lambda p, reason: refused.append((p.number, reason)))
    ]
    assert found == [(1, json.loads(ROW)), (3, {"a": 10**25}), (5, json.loads(ROW))]
    assert refused == [(4, f"not UTF-8: byte 0xff at byte offset {data.index(bytes([0xFF]))}; convert the file to UTF-8")]


def test_a_row_of_many_blocks_is_read(tmp_path: Path) -> None:
    long = "word " * (3 * data_file_module.BLOCK_BYTES // 5)
    assert rows_of(tmp_path, ROW + b"\n" + json.dumps({"t": long}).encode() + b"\n" + ROW)[1] == {"t": long}


def test_text_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    text = "日本語 \u2028 ü"
    row = json.dumps({"text": text}, ensure_ascii=False)
    for name, content in {"a.jsonl": row, "b.json": f"[{row}]", "c.csv": f"text\n{text}", "d.txt": text}.items():
        (tmp_path / name).write_bytes(content.encode())
    code = (
        "import sys; from twinkle_core.config import SourceConfig; from twinkle_core.preprocessor.sources import open_source\n"
        "print(ascii([row['text'] for _, row in open_source(SourceConfig(name='s', uri=sys.argv[1])).rows()]))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.stdout.strip(), done.returncode) == (ascii([text] * 4), 0), done.stderr


def test_the_same_content_has_the_same_digest_and_rows_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW)
    open_store("memory://sources/x").put("b.jsonl", ROW)
    local, stored = source(tmp_path / "a.jsonl"), source("memory://sources/x/b.jsonl")
    assert local.digest() == stored.digest() == source(f"file://{tmp_path}/a.jsonl").digest()
    assert [row for _, row in local.rows()] == [row for _, row in stored.rows()]
    before = local.digest()
    (tmp_path / "a.jsonl").write_bytes(ROW + b"\n")
    assert local.digest() != before


def test_the_digest_is_of_contents_in_order_and_of_how_they_are_read(tmp_path: Path) -> None:
    for name, data in {"a.jsonl": b"1", "b.jsonl": b"2", "ab.jsonl": b"12", "a.txt": b"1"}.items():
        (tmp_path / name).write_bytes(data)
    a, b, ab, text = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "ab.jsonl", "a.txt"))
    assert len({source(*files).digest() for files in [(a, b), (b, a), (ab,), (a,), (text,), (a, a)]}) == 6


def test_rows_in_memory_have_places_and_a_digest_of_their_content() -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "b": [None, "x"]}, {"a": 10**30}]
    assert list(RowsSource("mine", rows).rows()) == [(Place(None, "row", 1), rows[0]), (Place(None, "row", 2), rows[1])]
    digests = {RowsSource("mine", values).digest() for values in (rows, rows[::-1], [{"b": [None, "x"], "a": 1}, rows[1]], rows[:1])}
    assert len(digests) == 4
    assert RowsSource("other", list(rows)).digest() == RowsSource("mine", rows).digest()
    with pytest.raises(DataError, match="row 1: half of a surrogate"):
        list(RowsSource("mine", [{"t": "\ud83d"}]).rows())
    bad_rows: list[dict[str, Any]] = [{"t": "\ud83d"}, {"t": float("nan")}, {"t": b"bytes"}]
    for bad in bad_rows:
        with pytest.raises(DataError, match="row 1: it has no digest"):
            RowsSource("mine", [bad]).digest()
    with pytest.raises(DataError, match="no rows"):
        list(RowsSource("mine", []).rows())


def test_generated_rows_repeat_and_each_setting_changes_the_digest() -> None:
    uris = [f"reasoning_gym://{rest}" for rest in ("chain_sum?size=3&seed=1", "chain_sum?size=3&seed=2", "chain_sum?size=4&seed=1",
            "basic_arithmetic?size=3&seed=1", "chain_sum?size=3&seed=1&max_terms=3")]  # fmt: skip
    assert len({source(uri).digest() for uri in uris}) == len(uris)
    rows = [row for _, row in source(uris[0]).rows()]
    assert rows == [row for _, row in source(uris[0]).rows()]
    assert len(rows) == 3
    assert all(row["user_data"] == [["scorer", "last_number"], ["answer", row["messages"][1]["content"]]] for row in rows)
    place, row = next(source("reasoning_gym://countdown?size=1").rows())
    assert (str(place), row["user_data"][0]) == ("row 1", ["scorer", "exact"])


UNKNOWN: list[str | tuple[str, ...]] = [
    "reasoning_gym://nope?size=1", "reasoning_gym://chain_sum", "reasoning_gym://chain_sum?size=1&colour=2", "ftp://x/y.jsonl",
    "builtin://other", "rows.xlsx", "s3://x/y.jsonl", "s3://bucket/../b.jsonl", "~/rows.jsonl", "file://rows.jsonl", "", (),
]  # fmt: skip


@pytest.mark.parametrize("uri", UNKNOWN)
def test_unknown_places_and_settings_are_refused_before_anything_is_read(uri: str | tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        open_source(SourceConfig(name="s", uri=uri))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        source("none.jsonl").digest()


def test_importing_the_data_path_imports_nothing_heavy() -> None:
    names = ["dataset", "preprocessor", "template", "packing", "sharding", "dataloader", "processor"]
    heavy = ("torch", "ray", "transformers", "prefect", "mlflow", "datasets")
    code = f"import sys; [__import__('twinkle_core.' + n) for n in {names}]; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
