"""Public fault reports about rows and their layout, with the right result (`../shared/cases`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle_core.config import DataConfig, validate
from twinkle_core.errors import DataError
from twinkle_core.preprocessor import preprocess, read_trajectories
from twinkle_core.preprocessor.formats import convert, detect
from twinkle_core.types import NoProgress, Trajectory

CASES = Path(__file__).parents[3] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")


def rows(case: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / case / file).open(encoding="utf-8")]


def passed(case: str, file: str, out: Path, **settings: Any) -> tuple[list[Trajectory], dict[str, Any]]:
    """The trajectories that the stage makes of the file, in its order, and what the report says of it."""
    source = {"name": "case", "uri": str(CASES / case / file), "held_out": 0}
    report = preprocess(validate(DataConfig, {"sources": [source], **settings}), out, NoProgress())
    return list(read_trajectories(out / "train.jsonl")), report["sources"]["case"]


def test_ds08_tools_and_arguments_come_back_exactly(tmp_path: Path) -> None:
    made, _ = passed("DS08", "tools.jsonl", tmp_path)
    given = rows("DS08", "tools.jsonl")
    assert repr([one["tools"] for one in made]) == repr([row["tools"] for row in given])
    calls = [message["tool_calls"] for one in made for message in one["messages"] if "tool_calls" in message]
    assert repr(calls) == repr([message["tool_calls"] for row in given for message in row["messages"] if "tool_calls" in message])
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for line, forbidden in zip(
        lines, json.loads((CASES / "DS08" / "expected.json").read_text())["must_not_appear_in_rendered_row"], strict=True
    ):
        assert not any(word in line for word in [*forbidden, "null"])


def test_ds10_null_content_is_empty_beside_a_call_and_refused_without(tmp_path: Path) -> None:
    made, told = passed("DS10", "null_content.jsonl", tmp_path, on_bad_row="skip")
    assert len(made) == 2 and made[0]["messages"] == made[1]["messages"]
    assert "None" not in repr(made)
    assert [(item["line"], "content is null" in item["reason"]) for item in told["skipped_rows"]] == [(3, True), (4, True)]
    with pytest.raises(DataError, match="line 3: turn 2: the assistant turn's content is null"):
        passed("DS10", "null_content.jsonl", tmp_path)


def test_ds12_tags_of_both_forms_are_one_and_an_unknown_speaker_is_named(tmp_path: Path) -> None:
    made, told = passed("DS12", "sharegpt_mix.jsonl", tmp_path, on_bad_row="skip")
    said = [[(message["role"], message["content"]) for message in one["messages"]] for one in made]
    assert said[0] == [("user", "2+2?"), ("assistant", "4")]
    assert said[1] == [("system", "Be brief."), ("user", "3+3?"), ("assistant", "6")]
    assert said[2] == [("user", "4+4?"), ("assistant", "8")]
    assert said[3] == [("user", "weather?"), ("assistant", ""), ("tool", "clear"), ("assistant", "Clear.")]
    assert said[4] == [("user", "5+5?"), ("assistant", "10")]
    assert made[3]["messages"][1]["tool_calls"] == [{"type": "function", "function": {"name": "sky", "arguments": {}}}]
    (refused,) = told["skipped_rows"]
    assert (refused["line"], "unknown role 'moderator'" in refused["reason"]) == (5, True)


def test_ds15_text_parts_are_text_and_an_image_part_is_kept_whole(tmp_path: Path) -> None:
    made, _ = passed("DS15", "parts.jsonl", tmp_path)
    assert (
        made[0]["messages"] == made[1]["messages"] == [{"role": "user", "content": "plain text"}, {"role": "assistant", "content": "one"}]
    )
    assert "images" not in made[0] and made[2]["images"] == ["data:image/png;base64,iVBORw0KGgo="]
    assert made[2]["messages"][0]["content"] == [{"type": "text", "text": "what is it?"}, {"type": "image"}]


def test_ds19_integers_past_64_bits_pass_and_keep_their_digits(tmp_path: Path) -> None:
    ids = json.loads((CASES / "DS19" / "expected.json").read_text())["ids"]
    made, told = passed("DS19", "big_ints.jsonl", tmp_path)
    assert (len(made), told["ignored_keys"]) == (len(ids), {"id": len(ids)})
    for row, digits in zip(rows("DS19", "big_ints.jsonl"), ids, strict=True):
        call = {"type": "function", "function": {"name": "f", "arguments": {"id": row["id"]}}}
        asked = {"messages": [*row["messages"][:1], {"role": "assistant", "content": None, "tool_calls": [call]}]}
        (tmp_path / "one.jsonl").write_text(json.dumps(asked) + "\n")
        source = {"name": "one", "uri": str(tmp_path / "one.jsonl"), "held_out": 0}
        preprocess(validate(DataConfig, {"sources": [source]}), tmp_path, NoProgress())
        assert f'"id":{digits}}}' in (tmp_path / "train.jsonl").read_text()
        assert convert(asked, detect(asked))["messages"] == next(read_trajectories(tmp_path / "train.jsonl"))["messages"]
