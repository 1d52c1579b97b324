from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from twinkle_core.config import SourceConfig
from twinkle_core.dataset import open_source
from twinkle_core.errors import ConfigError, DataError

ROW = b'{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "A."}]}'
BOM = b"\xef\xbb\xbf"


def source(path: Path | str) -> Any:
    return open_source(SourceConfig(name="s", uri=str(path)))


def rows_of(tmp_path: Path, data: bytes, name: str = "rows.jsonl") -> list[tuple[int, dict[str, Any]]]:
    (tmp_path / name).write_bytes(data)
    return list(source(tmp_path / name).rows())


@pytest.mark.parametrize("data", [BOM + ROW + b"\n" + ROW, BOM + ROW + b"\r\n" + ROW + b"\r\n", b"\n" + ROW + b"\n \t\r\n\n" + ROW])
def test_bom_crlf_and_blank_lines_change_no_row(tmp_path: Path, data: bytes) -> None:
    assert [row for _, row in rows_of(tmp_path, data)] == [json.loads(ROW)] * 2


def test_a_record_ends_at_lf_only(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be"
    data = json.dumps({"t": text}, ensure_ascii=False).replace("\\u000b", "\x7f").encode() + b"\n" + ROW
    assert len(rows_of(tmp_path, data)) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ROW + b"\n\n" + ROW + b"\n" + ROW[:-3], "line 4: not valid JSON"),
        (ROW + b"\n" + BOM + ROW, "line 2: a byte order mark in the middle"),
        (ROW + b'\n{"a": "caf\xe9"}', r"line 2: not UTF-8: byte 0xe9 at byte offset 100"),
        ('{"a": 1}'.encode("utf-16"), "line 1: not UTF-8: byte 0xff at byte offset 0"),
        (ROW + b'\n{"a": "cut \\ud83d"}', "line 2: half of a surrogate pair"),
        (ROW + b'\n{"a": NaN}', "line 2: not valid JSON: NaN"),
        (ROW + b"\n[1]", "line 2: a row is an object, got list"),
        (b"", "no rows"),
        (b"\n \n", "no rows"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        rows_of(tmp_path, data)
    assert "rows.jsonl" in str(caught.value)


def test_bad_lines_go_to_the_callback_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROW + b"\n{\n" + BOM + ROW + b"\n" + ROW)
    refused: list[int] = []
    kept = [number for number, _ in source(tmp_path / "rows.jsonl").rows(lambda number, reason: refused.append(number))]
    assert (kept, refused) == ([1, 4], [2, 3])


def test_integers_keep_all_their_digits(tmp_path: Path) -> None:
    ids = [9007199254740993, 18446744073709551615, 10**30]
    assert [row["id"] for _, row in rows_of(tmp_path, b"\n".join(b'{"id": %d}' % i for i in ids))] == ids


def test_a_json_list_gives_its_rows_and_anything_else_is_refused(tmp_path: Path) -> None:
    assert rows_of(tmp_path, BOM + b"[" + ROW + b"]", "list.json") == [(1, json.loads(ROW))]
    with pytest.raises(DataError, match="a .json file holds one list"):
        rows_of(tmp_path, ROW, "one.json")


def test_the_same_content_has_the_same_digest_and_rows_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW)
    open_store("memory://sources/x").put("b.jsonl", ROW)
    local, stored = source(tmp_path / "a.jsonl"), source("memory://sources/x/b.jsonl")
    assert local.digest() == stored.digest()
    assert list(local.rows()) == list(stored.rows())
    (tmp_path / "a.jsonl").write_bytes(ROW + b"\n")
    assert local.digest() != stored.digest()


def test_generated_rows_repeat_and_each_setting_changes_the_digest() -> None:
    uris = [f"reasoning_gym://{rest}" for rest in ("chain_sum?size=3&seed=1", "chain_sum?size=3&seed=2", "chain_sum?size=4&seed=1",
            "basic_arithmetic?size=3&seed=1", "chain_sum?size=3&seed=1&max_terms=3")]  # fmt: skip
    assert len({source(uri).digest() for uri in uris}) == len(uris)
    rows = [row for _, row in source(uris[0]).rows()]
    assert rows == [row for _, row in source(uris[0]).rows()]
    assert len(rows) == 3
    assert all(row["user_data"] == [["scorer", "last_number"], ["answer", row["messages"][1]["content"]]] for row in rows)
    assert next(source("reasoning_gym://countdown?size=1").rows())[1]["user_data"][0] == ["scorer", "exact"]


@pytest.mark.parametrize("uri", ["reasoning_gym://nope?size=1", "reasoning_gym://chain_sum", "reasoning_gym://chain_sum?size=1&colour=2",
                                 "ftp://x/y.jsonl", "builtin://other", "rows.parquet"])  # fmt: skip
def test_unknown_places_and_settings_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        source(uri)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match="none.jsonl"):
        source("none.jsonl").digest()


def test_importing_the_data_path_imports_nothing_heavy() -> None:
    names = ["dataset", "preprocessor", "template", "packing", "sharding", "dataloader", "processor"]
    heavy = ("torch", "ray", "transformers", "prefect", "mlflow")
    code = f"import sys; [__import__('twinkle_core.' + n) for n in {names}]; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"
