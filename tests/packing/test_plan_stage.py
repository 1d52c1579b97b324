from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.packing.encoded_files import write_encoded
from twinkle_core.config import PackingConfig
from twinkle_core.errors import DataError
from twinkle_core.packing import pack, pack_windows, plan
from twinkle_core.types import NoProgress

LENGTHS = np.random.default_rng(0).integers(2, 60, 300).tolist()


def planned(folder: Path, out: Path, **packing: Any) -> tuple[dict[str, Any], list[list[int]]]:
    out.mkdir()
    report = plan(folder, PackingConfig(row_length=packing.pop("row_length", 64), **packing), out, NoProgress())
    assert json.loads((out / "report.json").read_text()) == report
    with pa.ipc.open_file(str(out / "plan.arrow")) as reader:
        table = reader.read_all()
    assert table.schema == pa.schema([("rows", pa.large_list(pa.int64()))])
    return report, table.column("rows").to_pylist()


def test_positions_go_over_all_parts_in_order_and_the_report_adds_up(tmp_path: Path) -> None:
    folder = write_encoded(tmp_path / "encoded", [LENGTHS[:130], [], LENGTHS[130:]], documents=2)
    report, rows = planned(folder, tmp_path / "out")
    assert rows == [row.tolist() for row in pack(np.array(LENGTHS), 64)]
    tokens = sum(LENGTHS)
    assert report == {
        "rows": len(rows),
        "samples": 300,
        "documents": 600,
        "tokens": tokens,
        "fill": round(tokens / (len(rows) * 64), 6),
        "fewest_rows_possible": -(-tokens // 64),
        "longest": max(LENGTHS),
    }


def test_how_samples_are_spread_over_files_and_batches_changes_nothing(tmp_path: Path) -> None:
    one = write_encoded(tmp_path / "one", [LENGTHS], batch_rows=300)
    other = write_encoded(tmp_path / "other", [LENGTHS[:1], LENGTHS[1:299], LENGTHS[299:]], batch_rows=3)
    assert planned(one, tmp_path / "a") == planned(other, tmp_path / "b")
    assert (tmp_path / "a" / "plan.arrow").read_bytes() == (tmp_path / "b" / "plan.arrow").read_bytes()


def test_without_packing_each_sample_has_a_row_in_order(tmp_path: Path) -> None:
    report, rows = planned(write_encoded(tmp_path / "encoded", [LENGTHS]), tmp_path / "out", algorithm="none")
    assert rows == [[number] for number in range(300)]
    assert report["rows"] == report["samples"] == report["documents"] == 300


def test_windows_are_packed_as_a_stream_is(tmp_path: Path) -> None:
    _, rows = planned(write_encoded(tmp_path / "encoded", [LENGTHS]), tmp_path / "out", window_samples=50)
    assert rows == [row.tolist() for part in pack_windows(LENGTHS, 64, 50) for row in part]
    assert rows != [row.tolist() for row in pack(np.array(LENGTHS), 64)]


@pytest.mark.parametrize("packing", [{"algorithm": "none"}, {}, {"window_samples": 2}])
def test_a_sample_longer_than_a_row_stops_the_plan(tmp_path: Path, packing: dict[str, Any]) -> None:
    folder = write_encoded(tmp_path / "encoded", [[5, 8], [9, 3]])
    with pytest.raises(DataError, match="sample 2 has 9 tokens, which does not fit a row of 1 to 8"):
        planned(folder, tmp_path / "out", row_length=8, **packing)


def test_of_a_pair_that_is_too_long_the_error_says_what_both_take(tmp_path: Path) -> None:
    """Of two documents each would fit."""
    folder = write_encoded(tmp_path / "encoded", [[5, 8, 11]], documents=2)
    with pytest.raises(DataError, match="sample 1 has 8 tokens.*the two of a preference pair.*raise packing.row_length to at least 11"):
        planned(folder, tmp_path / "out", row_length=7)


def test_no_samples_and_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no train-00000.arrow"):
        planned(tmp_path, tmp_path / "a")
    with pytest.raises(DataError, match="no samples in train-00000.arrow"):
        planned(write_encoded(tmp_path / "none", [[]]), tmp_path / "b")
    folder = write_encoded(tmp_path / "encoded", [[3], [4], [5]])
    cut = folder / "train-00002.arrow"
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(DataError, match="train-00002.arrow is not a whole file"):
        planned(folder, tmp_path / "c")
    (folder / "train-00001.arrow").unlink()
    with pytest.raises(DataError, match="there is no train-00001.arrow"):
        planned(folder, tmp_path / "d")
