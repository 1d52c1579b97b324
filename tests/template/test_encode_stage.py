from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.run import trajectory_line
from twinkle_core.sharding import EncodedDataset
from twinkle_core.template import Template, encode
from twinkle_core.types import NoProgress, Trajectory

_spec = importlib.util.spec_from_file_location("template_kinds_stage", Path(__file__).parent / "conftest.py")
assert _spec is not None and _spec.loader is not None
kinds = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kinds)

Folder = Callable[[str], Path]


def write(folder: Path, train: list[Trajectory], held_out: list[Trajectory]) -> Path:
    folder.mkdir()
    for name, rows in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(map(trajectory_line, rows)))
    return folder


def say(words: int) -> Trajectory:
    return {"messages": [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": f"ok {words}"}]}


def test_stage_writes_what_the_template_encodes_and_no_token_is_lost(tokenizer_folder: Folder, tmp_path: Path) -> None:
    rows = [say(words) for words in range(1, 600)]  # more than two batches
    template = Template(tokenizer_folder(kinds.CHATML), max_length=200, truncation_strategy="left")
    source, out = write(tmp_path / "in", rows, rows[:3]), tmp_path / "out"
    out.mkdir()
    report = encode(source, template, out, NoProgress())
    written = EncodedDataset(out / "train.arrow")
    expected = template.outcomes(rows)
    assert len(written) == len(rows) == report["train"]["documents"]
    assert written.rows() == list(range(len(rows)))
    for i in (0, 255, 256, 598):
        sample = expected[i].sample
        assert sample is not None
        assert written[i].input_ids.tolist() == sample.input_ids.tolist()
        assert written[i].labels.tolist() == sample.labels.tolist()
    assert report["train"]["truncated"] == sum(outcome.num_tokens > 200 for outcome in expected) > 0
    assert report["train"]["tokens"] + report["train"]["truncated_tokens"] == sum(outcome.num_tokens for outcome in expected)
    assert report["train"]["longest"] == 200
    assert report["held_out"]["documents"] == len(EncodedDataset(out / "held_out.arrow")) == 3
    with pa.ipc.open_file(str(out / "train.arrow")) as reader:
        assert reader.schema.field("input_ids").type == reader.schema.field("labels").type == pa.large_list(pa.int32())
    assert json.loads((out / "report.json").read_text()) == report


def test_dropped_documents_are_counted_and_none_left_is_an_error(tokenizer_folder: Folder, tmp_path: Path) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), max_length=60, truncation_strategy="delete")
    out = tmp_path / "out"
    out.mkdir()
    report = encode(write(tmp_path / "some", [say(1), say(100), say(2)], []), template, out, NoProgress())
    assert report["train"]["dropped"] == {"too_long": 1, "no_loss": 0}
    assert report["train"]["documents"] == len(EncodedDataset(out / "train.arrow")) == 2
    assert EncodedDataset(out / "train.arrow").rows() == [0, 2]
    with pytest.raises(DataError, match="no document is left"):
        encode(write(tmp_path / "none", [say(100)] * 8, []), template, out, NoProgress())


def test_a_row_that_cannot_be_encoded_is_named(tokenizer_folder: Folder, tmp_path: Path) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), max_length=60)
    with pytest.raises(DataError, match="train.jsonl, line 3: .*max_length is 60"):
        encode(write(tmp_path / "in", [say(1), say(2), say(100)], []), template, tmp_path, NoProgress())
