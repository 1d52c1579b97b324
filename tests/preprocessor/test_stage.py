from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.config import DataConfig, validate
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor import preprocess, read_trajectories
from twinkle_core.preprocessor.lines import content_digest, trajectory_line
from twinkle_core.preprocessor.sources import RowsSource
from twinkle_core.types import NoProgress, Trajectory, user_data_get

SELF = {"name": "self", "uri": "builtin://self_cognition", "processor": "SelfCognitionProcessor",
        "processor_args": {"name": "Brook", "author": "Hill Labs"}}  # fmt: skip


def data(*sources: dict[str, Any], **settings: Any) -> DataConfig:
    config: DataConfig = validate(DataConfig, {"sources": sources, **settings})
    return config


def write(path: Path, rows: list[Any]) -> dict[str, Any]:
    """The rows as a JSONL file, and the source that reads it; text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return {"name": path.stem, "uri": str(path), "held_out": 0}


def asked(out: Path, side: str = "train") -> list[str]:
    return [row["messages"][0]["content"] for row in read_trajectories(out / f"{side}.jsonl")]


def pair(query: str, response: str = "a") -> dict[str, Any]:
    return {"query": query, "response": response}


def add_up(report: dict[str, Any]) -> bool:
    parts = ("skipped", "dropped", "duplicates", "left_out", "train", "held_out")
    sources = report["sources"].values()
    return all(one["rows"] == sum(one[name] for name in parts) + sum(one["filtered"].values()) for one in sources) and all(
        report[side] == sum(one[side] for one in sources) for side in ("train", "held_out")
    )


def test_every_row_is_on_one_side_and_says_where_it_is_from(tmp_path: Path) -> None:
    sums = {"name": "sums", "uri": "reasoning_gym://chain_sum?size=20&seed=1", "held_out": 0.25}
    report = preprocess(data(SELF, sums), tmp_path, NoProgress())
    train, held_out = (list(read_trajectories(tmp_path / f"{side}.jsonl")) for side in ("train", "held_out"))
    assert add_up(report)
    assert (len(train), len(held_out)) == (report["train"], report["held_out"])
    assert report["sources"]["sums"]["held_out"] == 5 == sum(user_data_get(row, "source") == "sums" for row in held_out)
    assert report["sources"]["self"]["rows"] == len(train) + len(held_out) - 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held_out.jsonl", "report.json", "train.jsonl"]
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report


KINDS_OF_ROW = {
    "good": lambda number: pair(f"question {number} of them"),
    "same": lambda _: pair("the same question"),
    "short": lambda number: pair(str(number % 10), ""),
    "dropped": lambda number: pair(f"drop {number}"),
    "bad": lambda _: {"query": None, "response": "a"},
    "broken": lambda _: "{",
}


@settings(max_examples=40, deadline=None)
@given(
    sources=st.lists(st.lists(st.sampled_from(sorted(KINDS_OF_ROW)), min_size=1, max_size=15), min_size=1, max_size=3),
    mix=st.sampled_from(["concatenate", "interleave", "weighted"]),
    dedup=st.sampled_from(["none", "exact", "minhash"]),
    share=st.sampled_from([0.0, 0.3]),
    limit=st.sampled_from([None, 5]),
)
def test_no_row_is_lost_or_doubled_or_counted_twice(
    tmp_path_factory: pytest.TempPathFactory, sources: list[list[str]], mix: str, dedup: str, share: float, limit: int | None
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "mine_for_stage.py").write_text("def f(row):\n    return None if str(row['query']).startswith('drop') else row\n")
    configs = [
        {**write(folder / f"s{index}.jsonl", [KINDS_OF_ROW[kind](100 * index + number) for number, kind in enumerate(["good", *kinds])]),
         "processor": "mine_for_stage.py:f", "held_out": share, "limit": limit, "weight": index + 1}
        for index, kinds in enumerate(sources)
    ]  # fmt: skip
    filters = [{"name": "LengthFilter", "args": {"min_chars": 3}}]
    config = data(*configs, mix=mix, dedup=dedup, filters=filters, on_bad_row="skip")
    report = preprocess(config, folder, NoProgress(), trusted_code=folder)
    assert add_up(report)
    for index, kinds in enumerate(sources):
        told = report["sources"][f"s{index}"]
        if limit is None:
            assert told["rows"] == len(kinds) + 1
            assert told["skipped"] == kinds.count("bad") + kinds.count("broken") == len(told["skipped_rows"])
            assert (told["dropped"], told["filtered"].get("LengthFilter", 0)) == (kinds.count("dropped"), kinds.count("short"))
    written = [row["messages"][0]["content"] for side in ("train", "held_out") for row in read_trajectories(folder / f"{side}.jsonl")]
    assert len(written) == report["train"] + report["held_out"]
    if dedup != "none":
        assert len(set(written)) == len(written)
    if mix != "weighted" and limit is None:
        kept = sum(kinds.count("good") + 1 + kinds.count("same") for kinds in sources)
        assert len(written) + sum(told["duplicates"] for told in report["sources"].values()) == kept


def test_the_first_of_equals_stays_whatever_its_source_and_filters_go_before(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [pair("x"), pair("other words"), pair("x")])
    two = write(tmp_path / "two.jsonl", [pair("other words"), pair("new")])
    report = preprocess(data(one, two, dedup="exact"), tmp_path, NoProgress())
    assert [report["sources"][name]["duplicates"] for name in ("one", "two")] == [1, 1]
    assert asked(tmp_path) == ["x", "other words", "new"]


def test_near_duplicates_are_left_out_at_the_similarity_that_is_set(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(200)]
    near = " ".join([*words[:100], "changed", *words[101:]])
    source = write(tmp_path / "rows.jsonl", [{"text": " ".join(words)}, {"text": near}, {"text": "quite another text than that"}])
    assert preprocess(data(source, dedup="minhash"), tmp_path, NoProgress())["sources"]["rows"]["duplicates"] == 1
    assert preprocess(data(source, dedup="minhash", dedup_similarity=0.999), tmp_path, NoProgress())["sources"]["rows"]["duplicates"] == 0
    assert preprocess(data(source, dedup="exact"), tmp_path, NoProgress())["sources"]["rows"]["duplicates"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held_out.jsonl", "report.json", "rows.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("mix", "order", "left_out"),
    [
        ("concatenate", ["a0", "a1", "a2", "a3", "b0", "b1"], 0),
        ("interleave", ["a0", "b0", "a1", "b1", "a2", "a3"], 0),
        ("weighted", ["b0", "a0", "b1"], 3),
    ],
)
def test_sources_are_mixed_in_the_stated_order(tmp_path: Path, mix: str, order: list[str], left_out: int) -> None:
    a = write(tmp_path / "a.jsonl", [pair(f"a{number}") for number in range(4)])
    b = write(tmp_path / "b.jsonl", [pair(f"b{number}") for number in range(2)])
    report = preprocess(data({**a, "weight": 1}, {**b, "weight": 2}, mix=mix), tmp_path, NoProgress())
    assert asked(tmp_path) == order
    assert report["sources"]["a"]["left_out"] == left_out


def test_a_mix_by_weight_with_a_source_that_has_nothing_left_is_refused(tmp_path: Path) -> None:
    a, b = (write(tmp_path / f"{name}.jsonl", [pair("the same")]) for name in "ab")
    with pytest.raises(DataError, match="source 'b' has no rows to learn from"):
        preprocess(data(a, b, mix="weighted", dedup="exact"), tmp_path, NoProgress())


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


def test_a_bad_row_ends_the_run_or_is_counted_and_listed(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [pair("q0"), {"query": "x", "response": None}, "{", pair("q1"), {"text": "another layout"}])
    with pytest.raises(DataError, match=r"source 'rows', .*line 2: 'response' must be text"):
        preprocess(data(source), tmp_path, NoProgress())
    report = preprocess(data(source, on_bad_row="skip"), tmp_path, NoProgress())["sources"]["rows"]
    assert (report["rows"], report["skipped"], report["train"]) == (5, 3, 2)
    assert [item["line"] for item in report["skipped_rows"]] == [2, 3, 5]
    assert report["format"] == "query_response"


def test_a_limit_takes_rows_from_the_start(tmp_path: Path) -> None:
    preprocess(data({**SELF, "limit": 2, "held_out": 0}), tmp_path, NoProgress())
    assert asked(tmp_path) == ["Who are you?", "who are you"]


def test_columns_are_renamed_before_anything_looks_at_them(tmp_path: Path) -> None:
    rows = [{"Q": "q", "A": "a", "response": None, "id": 1}]
    source = write(tmp_path / "rows.jsonl", rows)
    report = preprocess(data({**source, "columns": {"Q": "query", "A": "response"}}), tmp_path, NoProgress())["sources"]["rows"]
    assert (asked(tmp_path), report["ignored_keys"]) == (["q"], {"id": 1})
    with pytest.raises(DataError, match=r"columns names \['Question'\], which no row has"):
        preprocess(data({**source, "columns": {"Q": "query", "A": "response", "Question": "x"}}), tmp_path, NoProgress())
    with pytest.raises(DataError, match="'query' is there twice"):
        preprocess(data({**source, "columns": {"Q": "query", "A": "query"}}), tmp_path, NoProgress())


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([{"name": "LengthFilter", "args": {"min_chars": 1}}, {"name": "LengthFilter", "args": {"min_chars": 99}}],
         "filter 'LengthFilter 2' keeps none of the 2 rows that reach it"),
        ([{"name": "RoleOrderFilter"}, {"name": "mine_none.py:none"}], "filter 'mine_none.py:none' keeps none of the 3"),
    ],
)  # fmt: skip
def test_a_filter_that_keeps_nothing_ends_the_run_and_is_named(tmp_path: Path, filters: Any, message: str) -> None:
    (tmp_path / "mine_none.py").write_text("def none(trajectory):\n    return False\n")
    source = write(tmp_path / "rows.jsonl", [pair("a"), pair("", ""), pair("b")])
    with pytest.raises(DataError, match=message):
        preprocess(data(source, filters=filters), tmp_path, NoProgress(), trusted_code=tmp_path)


def test_an_error_in_the_users_code_says_at_which_row(tmp_path: Path) -> None:
    (tmp_path / "mine_bad.py").write_text("def f(row):\n    return row['nothing']\n")
    source = {**write(tmp_path / "rows.jsonl", [pair("a")]), "processor": "mine_bad.py:f"}
    with pytest.raises(KeyError) as caught:
        preprocess(data(source), tmp_path, NoProgress(), trusted_code=tmp_path)
    assert any("mine_bad.py:f of source 'rows', " in note and "line 1" in note for note in caught.value.__notes__)


def test_settings_that_would_teach_placeholders_or_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SelfCognitionProcessor"):
        preprocess(data({"name": "self", "uri": "builtin://self_cognition"}), tmp_path, NoProgress())
    with pytest.raises(ConfigError, match="'author' .*is missing"):
        preprocess(data({**SELF, "processor_args": {"name": "B"}}), tmp_path, NoProgress())
    with pytest.raises(DataError, match="no rows left to train on"):
        preprocess(data({**SELF, "limit": 1, "held_out": 0.9}), tmp_path, NoProgress())


def test_rows_in_memory_take_the_place_of_a_named_source(tmp_path: Path) -> None:
    source: Any = RowsSource("mine", [pair("a"), pair("b")])
    config = data({"name": "mine", "uri": "rows.jsonl", "held_out": 0})
    assert preprocess(config, tmp_path, NoProgress(), sources={"mine": source})["train"] == 2


def test_lines_keep_key_order_and_every_digit_and_come_back_equal(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"z": 10**30, "a": [None, 1.5, -(2**63)], "\u2028": "\x00"}}}
    made: Trajectory = {
        "messages": [{"role": "user", "content": "q \U0001f642"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": "f"}}],
        "user_data": [("source", "x"), ("answer", "é")],
    }
    (tmp_path / "t.jsonl").write_bytes(trajectory_line(made) * 2)
    assert repr(list(read_trajectories(tmp_path / "t.jsonl"))) == repr([made, made])


TEXT = st.text(st.characters(codec="utf-8"))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=8))
def test_any_json_value_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("lines") / "t.jsonl"
    made: Any = {"messages": [], "tools": [{"z": 1, "a": value, "b": 2}]}
    path.write_bytes(trajectory_line(made))
    assert repr(list(read_trajectories(path))) == repr([made])


def test_a_digest_tells_contents_apart_and_nothing_else() -> None:
    made: Trajectory = {"messages": [{"role": "user", "content": "q"}], "user_data": [("a", "b")]}
    others: list[Any] = [{**made, "desirable": True}, {**made, "desirable": False}, {**made, "tools": [{}]}, {"messages": [], "text": "q"}]
    assert content_digest(made) == content_digest({"messages": made["messages"]})
    assert len({content_digest(one) for one in [made, *others]}) == 5
    assert len(content_digest(made)) == 16


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "JSON cannot hold"), ("\ud800", r"half of a surrogate pair \(U\+D800\)"), (b"x", "JSON cannot hold")],
)
def test_what_a_line_cannot_hold_is_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trajectory_line({"messages": [], "tools": [{"x": value}]})


def test_such_a_value_is_refused_by_row_and_counted(tmp_path: Path) -> None:
    (tmp_path / "mine_nan.py").write_text(
        "def f(row):\n    return {**row, 'tools': [{'name': 'f', 'x': float('nan')}]} if row['query'] == 'b' else row\n"
    )
    source = {**write(tmp_path / "rows.jsonl", [pair("a"), pair("b")]), "processor": "mine_nan.py:f"}
    with pytest.raises(DataError, match="line 2: a value that JSON cannot hold"):
        preprocess(data(source), tmp_path, NoProgress(), trusted_code=tmp_path)
    report = preprocess(data(source, on_bad_row="skip"), tmp_path, NoProgress(), trusted_code=tmp_path)
    assert add_up(report) and report["sources"]["rows"]["skipped"] == 1


REAL = {
    "gsm8k/train.jsonl": ("query_response", "conversation", 7473),
    "gsm8k/test.jsonl": ("query_response", "conversation", 1319),
    "llamafactory/alpaca_en_demo.json": ("alpaca", "conversation", 999),
    "llamafactory/alpaca_zh_demo.json": ("alpaca", "conversation", 1000),
    "llamafactory/c4_demo.jsonl": ("text", "text", 300),
    "llamafactory/dpo_en_demo.json": ("preference", "preference", 300),
    "llamafactory/glaive_toolcall_en_demo.json": ("sharegpt", "conversation", 300),
    "llamafactory/identity.json": ("alpaca", "conversation", 91),
    "llamafactory/kto_en_demo.json": ("judged", "judged", 300),
    "llamafactory/reason_tool_use_demo_50.jsonl": ("messages", "conversation", 50),
    "llamafactory/v1_sft_demo.jsonl": ("messages", "conversation", 500),
}


@pytest.mark.parametrize("dedup", ["none", "exact", "minhash"])
def test_every_real_file_passes_with_counts_that_add_up(tmp_path: Path, shared_data: Path, dedup: str) -> None:
    assert {str(path.relative_to(shared_data)) for path in shared_data.glob("*/*.json*")} == REAL.keys()
    sources = [{"name": path.replace("/", "-"), "uri": str(shared_data / path)} for path in REAL]
    report = preprocess(data(*sources, dedup=dedup), tmp_path, NoProgress())
    assert add_up(report)
    found = {name: (told["format"], told["kinds"], told["rows"]) for name, told in report["sources"].items()}
    assert found == {path.replace("/", "-"): (layout, {kind: rows}, rows) for path, (layout, kind, rows) in REAL.items()}
    assert all(not told["skipped"] and not told["ignored_keys"] for told in report["sources"].values())
    written = sum(1 for side in ("train", "held_out") for _ in read_trajectories(tmp_path / f"{side}.jsonl"))
    assert written == report["train"] + report["held_out"] == 12632 - sum(told["duplicates"] for told in report["sources"].values())


@pytest.mark.slow
def test_memory_grows_by_no_more_than_the_stated_bytes_a_row(tmp_path: Path) -> None:
    rows = 200_000
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(rows):
            file.write(json.dumps(pair(f"question {number} {'x' * 1000}")) + "\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    preprocess(data({"name": "rows", "uri": str(tmp_path / "rows.jsonl")}, dedup="exact"), tmp_path, NoProgress())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 64 * 2**20 + 200 * rows


class Counting:
    """A `Progress` that adds up."""

    def __init__(self) -> None:
        self.started, self.rows = list[tuple[str, int | None, str]](), 0

    def start(self, description: str, total: int | None, unit: str) -> None:
        self.started.append((description, total, unit))

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        self.rows += amount


def test_what_the_stage_writes_is_a_source_again_with_the_same_contents(tmp_path: Path) -> None:
    rows = {
        "texts": {"text": "t"},
        "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
        "judged": {"prompt": "q", "completion": "a", "label": False},
        "prompts": {"prompt": "q", "answer": "4"},
        "embeddings": {"query": "q", "pos": ["p"], "neg": ["n"]},
        "images": {"query": "<image>", "response": "a", "images": ["x.png"]},
    }
    for name, row in rows.items():
        preprocess(data(write(tmp_path / f"{name}.jsonl", [row])), tmp_path, NoProgress())
        first = next(read_trajectories(tmp_path / "train.jsonl"))
        again = {"name": name, "uri": str((tmp_path / "train.jsonl").rename(tmp_path / f"again-{name}.jsonl")), "held_out": 0}
        report = preprocess(data(again), tmp_path, NoProgress())
        assert next(read_trajectories(tmp_path / "train.jsonl")) == {**first, "user_data": [("source", name), *first["user_data"]]}
        assert not report["sources"][name]["ignored_keys"]


def test_progress_counts_the_rows_that_are_read_whatever_becomes_of_them(tmp_path: Path) -> None:
    rows = [pair("x" * (number % 7)) for number in range(700)]
    source, counting = write(tmp_path / "rows.jsonl", ["{", *rows]), Counting()
    filters = [{"name": "LengthFilter", "args": {"min_chars": 7}}]
    preprocess(data(source, filters=filters, on_bad_row="skip"), tmp_path, counting)
    assert (counting.started, counting.rows) == ([("preprocess", None, "rows")], 701)


def test_the_weight_of_a_turn_does_not_carry_a_conversation_to_the_other_side(tmp_path: Path) -> None:
    rows = []
    for i in range(60):
        question, answer = {"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}
        rows += [{"messages": [question, answer]}, {"messages": [question, {**answer, "weight": 1}]}]
    source = write(tmp_path / "rows.jsonl", rows) | {"held_out": 0.3}
    preprocess(data(source), tmp_path, NoProgress())
    assert asked(tmp_path, "held_out")
    assert set(asked(tmp_path)).isdisjoint(asked(tmp_path, "held_out"))
    report = preprocess(data(source, dedup="exact"), tmp_path, NoProgress())
    assert report["train"] + report["held_out"] == 60
