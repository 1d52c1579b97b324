from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.config import DataConfig, validate
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor import SelfCognitionProcessor, preprocess, read_trajectories
from twinkle_core.preprocessor.split import split
from twinkle_core.types import NoProgress, user_data_get

SELF = {"name": "self", "uri": "builtin://self_cognition", "processor": "SelfCognitionProcessor",
        "processor_args": {"name": "Brook", "author": "Hill Labs"}}  # fmt: skip


def keys(values: list[int]) -> list[bytes]:
    return [b"%d" % value for value in values]


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=60), st.floats(0, 0.99), st.integers(0, 5))
def test_distinct_rows_are_held_out_in_the_exact_number_whatever_their_order(values: list[int], share: float, seed: int) -> None:
    mask = split([keys(values)], [share], seed)[0]
    assert mask.sum() == round(share * len(values))
    turned = split([keys(values[::-1])], [share], seed)[0]
    assert turned[::-1].tolist() == mask.tolist()


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=30), min_size=1, max_size=3), st.floats(0, 0.9))
def test_identical_rows_are_on_one_side_also_across_sources(sources: list[list[int]], share: float) -> None:
    masks = split([keys(values) for values in sources], [share] * len(sources), 0)
    sides: dict[int, set[bool]] = {}
    for values, mask in zip(sources, masks, strict=True):
        for value, flag in zip(values, mask.tolist(), strict=True):
            sides.setdefault(value, set()).add(flag)
    assert all(len(side) == 1 for side in sides.values())
    assert masks[0].sum() <= round(share * len(sources[0]))


def test_the_seed_changes_which_rows_are_held_out() -> None:
    one, other = (split([keys(list(range(100)))], [0.2], seed)[0] for seed in (0, 1))
    assert one.sum() == other.sum() == 20
    assert (one != other).any()


def data(*sources: dict[str, Any], **settings: Any) -> DataConfig:
    config: DataConfig = validate(DataConfig, {"sources": sources, **settings})
    return config


def test_every_row_is_on_one_side_and_says_where_it_is_from(tmp_path: Path) -> None:
    sums = {"name": "sums", "uri": "reasoning_gym://chain_sum?size=20&seed=1", "held_out": 0.25}
    report = preprocess(data(SELF, sums), tmp_path, NoProgress())
    train, held_out = (list(read_trajectories(tmp_path / f"{side}.jsonl")) for side in ("train", "held_out"))
    assert (len(train), len(held_out)) == (report["train"], report["held_out"])
    assert report["sources"]["sums"]["held_out"] == 5 == sum(user_data_get(row, "source") == "sums" for row in held_out)
    assert report["sources"]["self"]["rows"] == len(train) + len(held_out) - 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held_out.jsonl", "report.json", "train.jsonl"]
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report


def test_self_cognition_says_the_name_is_scored_by_it_and_keeps_no_placeholder(tmp_path: Path) -> None:
    preprocess(data({**SELF, "held_out": 0}), tmp_path, NoProgress())
    rows = list(read_trajectories(tmp_path / "train.jsonl"))
    text = (tmp_path / "train.jsonl").read_text(encoding="utf-8")
    assert "{name}" not in text
    assert "{author}" not in text
    scored = [row for row in rows if user_data_get(row, "scorer")]
    assert 0 < len(scored) < len(rows)
    for row in rows:
        expected = ("contains", "Brook") if "Brook" in row["messages"][-1]["content"] else (None, None)
        assert (user_data_get(row, "scorer"), user_data_get(row, "answer")) == expected


def test_all_spellings_of_the_placeholders_are_filled() -> None:
    fill = SelfCognitionProcessor(name="B", author="H")
    assert fill({"a": "{name} {{NAME}} {{name}}", "b": [{"c": "{author} {{AUTHOR}} {other}"}]}) == {
        "a": "B B B",
        "b": [{"c": "H H {other}"}],
    }


def test_a_bad_row_ends_the_run_or_is_counted_and_listed(tmp_path: Path) -> None:
    good = '{"query": "q%d", "response": "a"}'
    lines = [good % 0, '{"query": "x", "response": null}', "{", good % 1]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = {"name": "mine", "uri": str(tmp_path / "rows.jsonl"), "held_out": 0}
    with pytest.raises(DataError, match=r"source 'mine' .*rows.jsonl\), line 2: 'response' must be text"):
        preprocess(data(source), tmp_path, NoProgress())
    report = preprocess(data(source, on_bad_row="skip"), tmp_path, NoProgress())["sources"]["mine"]
    assert (report["rows"], report["skipped"], [item["line"] for item in report["skipped_rows"]]) == (2, 2, [2, 3])


def test_a_limit_takes_rows_from_the_start(tmp_path: Path) -> None:
    preprocess(data({**SELF, "limit": 2, "held_out": 0}), tmp_path, NoProgress())
    assert [row["messages"][0]["content"] for row in read_trajectories(tmp_path / "train.jsonl")] == ["Who are you?", "who are you"]


def test_settings_that_would_teach_placeholders_or_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SelfCognitionProcessor"):
        preprocess(data({"name": "self", "uri": "builtin://self_cognition"}), tmp_path, NoProgress())
    with pytest.raises(ConfigError, match="exactly the processor_args name and author"):
        preprocess(data({**SELF, "processor_args": {"name": "B"}}), tmp_path, NoProgress())
    with pytest.raises(DataError, match="no rows left to train on"):
        preprocess(data({**SELF, "limit": 1, "held_out": 0.9}), tmp_path, NoProgress())
