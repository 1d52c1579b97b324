import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.params import SFTParams
from twinkle_cli.init import commented_recipe
from twinkle_cli.recipes import load_recipe, load_yaml, merge, put
from twinkle_core.config import validate
from twinkle_core.errors import ConfigError

READINGS = [
    ("1e-4", 1e-4),
    ("1E5", 1e5),
    ("-2.5e+3", -2500.0),
    (".5", 0.5),
    ("3.", 3.0),
    ("7", 7),
    ("-7", -7),
    ("010", 10),
    ("1_000", "1_000"),
    ("no", "no"),
    ("on", "on"),
    ("true", True),
    ("null", None),
    ("~", None),
    ("", None),
    ("2026-01-01", "2026-01-01"),
    ("1:30", "1:30"),
    ("0x10", "0x10"),
    (".inf", math.inf),
    ("'7'", "7"),
    ("[1, 2.5, a]", [1, 2.5, "a"]),
    ("{a: {b: 1}}", {"a": {"b": 1}}),
]


@pytest.mark.parametrize(("text", "value"), READINGS, ids=[text or "empty" for text, _ in READINGS])
def test_scalars_are_read_as_people_mean_them(text: str, value: Any) -> None:
    read = load_yaml(text, "here")
    assert read == value
    assert type(read) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_comes_back(value: float) -> None:
    assert load_yaml(repr(value), "here") == value


@given(st.integers())
def test_every_integer_comes_back(value: int) -> None:
    read = load_yaml(str(value), "here")
    assert read == value
    assert type(read) is int


REFUSED = [
    ("a: 1\nb: 2\na: 3\n", "r.yaml, line 3, column 1: key 'a' stands twice"),
    ("a:\n  x: 1\n  x: 1\n", "r.yaml, line 3, column 3: key 'x' stands twice"),
    ("a: [1, 2\nb: 3\n", "r.yaml, line 2"),
    ("a: 1\n\tb: 2\n", "r.yaml, line 2"),
    ("1: a\n", "r.yaml, line 1, column 1: key 1 is not text"),
    ("a: !!python/object/apply:os.system ['true']\n", "r.yaml, line 1, column 4"),
    ("- 1\n- 2\n", "holds a list"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_wrong_file_is_refused_with_the_place(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe("r.yaml")
    assert message in str(caught.value)


def test_a_built_in_recipe_is_found_by_name_and_an_unknown_one_gets_the_nearest() -> None:
    assert load_recipe("demo")["publish"]["name"]
    with pytest.raises(ConfigError, match="no file 'dmeo'; did you mean 'demo'"):
        load_recipe("dmeo")


def test_set_goes_over_options_and_options_over_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {"data": {"sources": [{"name": "old", "uri": "old.jsonl"}], "split_seed": 3}, "publish": {"name": "a"}, "train": {"epochs": 2}}
    sets = ["data.sources.0.limit=5", "publish.name=c", "train.lr=1e-4", "train.lr=2e-4"]
    merged = merge(recipe, data="My rows!.jsonl", model="org/name", name="b", sets=sets)
    assert merged == {
        "data": {"sources": [{"name": "My_rows_", "uri": str(tmp_path / "My rows!.jsonl"), "limit": 5}], "split_seed": 3},
        "publish": {"name": "c"},
        "train": {"epochs": 2, "lr": 2e-4},
        "model": {"source": "org/name"},
    }
    assert recipe["data"] == {"sources": [{"name": "old", "uri": "old.jsonl"}], "split_seed": 3}


def test_local_paths_become_absolute_and_addresses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert merge({}, data=None, model="model", name=None, sets=[])["model"]["source"] == str(tmp_path / "model")
    assert merge({}, data=None, model="./gone", name=None, sets=[])["model"]["source"] == str(tmp_path / "gone")
    for address in ("org/name", "hf://org/name", "s3://bucket/model"):
        assert merge({}, data=None, model=address, name=None, sets=[])["model"]["source"] == address
    assert merge({}, data="s3://bucket/rows.jsonl", model=None, name=None, sets=[])["data"]["sources"] == [
        {"name": "rows", "uri": "s3://bucket/rows.jsonl"}
    ]


BAD_SETS = ["train.lr", "=1", "data.sources.1.limit=5", "data.sources.x=5", "publish.name.deep=1", "train.lr=[1", "train.lr={a: 1, a: 2}"]


@pytest.mark.parametrize("text", BAD_SETS)
def test_a_wrong_set_is_refused(text: str) -> None:
    recipe = {"data": {"sources": [{"name": "a", "uri": "a"}]}, "publish": {"name": "a"}}
    with pytest.raises(ConfigError):
        merge(recipe, data=None, model=None, name=None, sets=[text])


def test_null_switches_a_group_off_and_a_key_below_it_on_again() -> None:
    off = merge({"train": {"lora": {"rank": 4}}}, data=None, model=None, name=None, sets=["train.lora=null"])
    assert off == {"train": {"lora": None}}
    assert put(off, "train.lora.rank", 8) == {"train": {"lora": {"rank": 8}}}


def test_the_commented_recipe_says_all_defaults_and_nothing_else() -> None:
    text = commented_recipe("sft", data="mine.jsonl", model="org/name")
    written = validate(SFTParams, load_yaml(text, "recipe"))
    minimal = {"model": {"source": "org/name"}, "data": {"sources": [{"name": "rows", "uri": "mine.jsonl"}]}}
    assert written == validate(SFTParams, minimal)
    assert text.count("[resource]") > 10
    keys = {line.split(":")[0].strip(" -") for line in text.splitlines() if ":" in line and "#" not in line}
    assert {"lr", "rank", "held_out", "workers", "max_loss_increase", "processor_args"} <= keys
    assert max(map(len, text.splitlines())) <= 120
