import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dataset.chats import FRAME_TOKENS, chat, chats, ids, plain
from twinkle_core.dataset import Dataset, DatasetMeta, LazyDataset, input_feature
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor import LengthFilter, SelfCognitionProcessor
from twinkle_core.types import IGNORE


def encoded(rows: Any, template: Any, cls: type[Dataset] = Dataset) -> Dataset:
    dataset = cls(DatasetMeta(data=rows))
    dataset.set_template(template)
    dataset.encode()
    return dataset


def test_features_are_what_the_template_encodes(template: Any) -> None:
    rows = chats([3, 0, 5])
    dataset = encoded(rows, template)
    assert len(dataset) == 3
    assert plain(dataset) == plain(input_feature(sample) for sample in template.batch_encode(rows))
    assert dataset[-1]["length"] == FRAME_TOKENS + 3 + 5
    assert sum(label != IGNORE for label in dataset[0]["labels"].tolist()) == 4
    with pytest.raises(IndexError):
        dataset[3]


def test_functions_are_applied_in_the_order_of_the_calls(template: Any) -> None:
    dataset = Dataset(DatasetMeta(data=[{"n": number} for number in range(6)]))
    dataset.map(lambda row: {**row, "prompt": str(row["n"]), "completion": "x" * row["n"]})
    dataset.filter(lambda row: row["n"] % 2 == 0)
    assert [row["n"] for row in dataset] == [0, 2, 4]
    dataset.set_template(template)
    dataset.encode()
    assert ids(dataset) == ids(input_feature(sample) for sample in template.batch_encode([chat(str(n), "x" * n) for n in (0, 2, 4)]))
    report = dataset.report
    assert (report["rows"], report["filtered"], report["encoded"], report["samples"]) == (6, 3, 3, 3)


def test_preprocessors_and_filters_by_name_class_and_instance() -> None:
    rows = [{"query": "Who are you?", "response": "I am {name} of {author}."}, {"query": "Hi", "response": "{name}"}]
    results = []
    for given_one, arguments in (
        ("SelfCognitionProcessor", {"model_name": "Ash", "model_author": "Elm"}),
        (SelfCognitionProcessor, {"model_name": "Ash", "model_author": "Elm"}),
        (SelfCognitionProcessor("Ash", "Elm"), None),
    ):
        dataset = Dataset(DatasetMeta(data=rows))
        dataset.map(given_one, init_args=arguments)
        dataset.filter("LengthFilter", init_args={"min_chars": 10})
        dataset.filter(LengthFilter(max_turns=2))
        results.append(list(dataset))
    assert results[0] == results[1] == results[2]
    assert results[0][0]["messages"][1]["content"] == "I am Ash of Elm."
    assert len(results[0]) == 1
    assert rows[0]["response"] == "I am {name} of {author}."


@pytest.mark.parametrize("name", ["SelfCognition", "ms://org/plugin", "hf://org/plugin", "os.system", "mine.py:function"])
def test_a_string_names_registered_things_only(name: str, template: Any) -> None:
    dataset = Dataset(DatasetMeta(data=chats([1])))
    for call in (dataset.map, dataset.filter):
        with pytest.raises(ConfigError):
            call(name)
    with pytest.raises(ConfigError):
        dataset.set_template(name, model_id="somewhere")
    assert list(dataset) == chats([1])


def test_what_a_function_returns_is_checked_and_named() -> None:
    dataset = Dataset(DatasetMeta(data=chats([1])))
    with pytest.raises(DataError, match=r"rows in memory, row 1: map\(<lambda>\): the function returned NoneType"):
        dataset.map(lambda row: None)
    with pytest.raises(ConfigError, match="True"):
        dataset.filter(lambda row: None)
    with pytest.raises(KeyError) as caught:
        dataset.map(lambda row: row["missing"])
    assert caught.value.__notes__ == ["in map(<lambda>) of rows in memory, row 1"]


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, template: Any) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [*chats([1] * 300), {"messages": [{"role": "robot", "content": "?"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = Dataset(DatasetMeta(path))
    dataset.set_template(template)
    with pytest.raises(DataError, match=r"chats.jsonl, line 301: .*robot"):
        dataset.encode()
    assert dataset.report["encoded"] == 0
    dataset.check()
    assert len(dataset) == 300
    assert dataset.report["refused"] == 1
    [refused] = dataset.report["sources"][str(path)]["refused_rows"]
    assert refused["row"].endswith("line 301")
    assert "robot" in refused["reason"]
    dataset.encode()
    assert len(dataset) == 300


LONG = st.lists(st.integers(0, 60), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=LONG, second=LONG, interleave=st.booleans(), rule=st.sampled_from(["delete", "split", "right", "left"]))
def test_every_row_is_encoded_filtered_or_dropped(
    tokenizer: Path, first: list[int], second: list[int], interleave: bool, rule: str
) -> None:
    dataset = Dataset(DatasetMeta(data=chats(first)))
    dataset.add_dataset(DatasetMeta(data=chats(second, 100)))
    dataset.filter(lambda row: len(row["messages"][1]["content"]) != 7)
    dataset.mix_dataset(interleave)
    dataset.set_template("Template", model_id=tokenizer, max_length=FRAME_TOKENS + 23, truncation_strategy=rule)
    if not [length for length in first + second if length != 7 and (length <= 20 or rule != "delete")]:
        with pytest.raises(DataError, match="no sample is left"):
            dataset.encode()
        return
    dataset.encode()
    report = dataset.report
    for name, lengths in (("rows in memory #1", first), ("rows in memory #2", second)):
        part = report["sources"][name]
        assert part["rows"] == len(lengths) == part["filtered"] + sum(part["dropped"].values()) + part["encoded"]
        assert part["filtered"] == lengths.count(7)
        assert part["dropped"]["too_long"] == (sum(length > 20 for length in lengths) if rule == "delete" else 0)
    kept = [length for length in first + second if length != 7 and (length <= 20 or rule != "delete")]
    assert report["tokens"] + report["truncated_tokens"] == sum(FRAME_TOKENS + 3 + length for length in kept)
    assert report["samples"] == len(dataset)
    assert report["tokens"] == sum(feature["length"] for feature in dataset)


@pytest.mark.parametrize(
    ("interleave", "expected"), [(True, ["000", "100", "001", "101", "002", "003"]), (False, ["000", "001", "002", "003", "100", "101"])]
)
def test_sources_are_mixed_without_loss(interleave: bool, expected: list[str], template: Any) -> None:
    dataset = Dataset(DatasetMeta(data=chats([1] * 4)))
    other = DatasetMeta(data=chats([1] * 2, 100))
    dataset.add_dataset(other)
    for use in (lambda: len(dataset), lambda: dataset[0], dataset.encode, lambda: list(dataset)):
        dataset.template = template
        with pytest.raises(ConfigError, match="mix_dataset"):
            use()
    dataset.map(lambda row: {**row, "user_data": [("from", "other")]}, dataset_meta=other)
    dataset.mix_dataset(interleave)
    assert [row["messages"][0]["content"] for row in dataset] == expected
    assert [row["messages"][0]["content"] for row in dataset if "user_data" in row] == ["100", "101"]


def test_prompts_keep_what_is_known_of_their_answer(template: Any) -> None:
    row = {"messages": [{"role": "user", "content": "2+2?"}], "user_data": [("answer", "4")]}
    dataset = Dataset(DatasetMeta(data=[row]))
    dataset.set_template(template)
    with pytest.raises(DataError, match="row 1: the conversation has no answer of the assistant"):
        dataset.encode()
    dataset.encode(add_generation_prompt=True)
    assert template.decode(dataset[0]["input_ids"]).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert dataset[0]["user_data"] == [("answer", "4")]
    assert dataset[0]["messages"] == row["messages"]
    assert (dataset[0]["labels"] == IGNORE).all()
    answered = Dataset(DatasetMeta(data=chats([1])))
    answered.set_template(template)
    with pytest.raises(DataError, match="row 1: with add_generation_prompt"):
        answered.encode(add_generation_prompt=True)


def test_preference_pairs_keep_their_kinds(template: Any) -> None:
    rows = [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}]
    feature = encoded(rows, template)[0]
    assert feature["kinds"].tolist() == [1, 2]
    assert len(feature["seq_lens"]) == 2


def test_several_processes_give_the_same(template: Any) -> None:
    rows = [*chats([5] * 300), {"messages": [{"role": "user", "content": "?"}]}, *chats([1])]
    dataset = Dataset(DatasetMeta(data=rows[:300]))
    dataset.set_template(template)
    dataset.encode(num_proc=2)
    assert ids(dataset) == ids(encoded(rows[:300], template))
    bad = Dataset(DatasetMeta(data=rows))
    bad.set_template(template)
    with pytest.raises(DataError, match="row 301: the conversation has no answer"):
        bad.encode(num_proc=2)


def test_the_builtin_set_is_not_learnt_with_its_placeholders(template: Any) -> None:
    dataset = Dataset(DatasetMeta("builtin://self_cognition"))
    dataset.set_template(template)
    with pytest.raises(ConfigError, match="SelfCognitionProcessor"):
        dataset.encode()
    dataset.map(SelfCognitionProcessor(model_name="Ash", model_author="Elm"))
    assert not any("{name}" in json.dumps(row) for row in dataset)


def test_calls_out_of_order_say_what_comes_first(template: Any) -> None:
    with pytest.raises(ConfigError, match="no source"):
        len(Dataset())
    dataset = Dataset(DatasetMeta(data=chats([1])))
    with pytest.raises(ConfigError, match="set_template before"):
        dataset.encode()
    dataset.set_template(template)
    with pytest.raises(ConfigError, match="num_proc is 0"):
        dataset.encode(num_proc=0)
    dataset.encode(batched=True, load_from_cache_file=False)
    for late in (
        dataset.encode, dataset.check, dataset.mix_dataset, lambda: dataset.map(shout), lambda: dataset.filter(shout),
        lambda: dataset.add_dataset(DatasetMeta(data=[])), lambda: dataset.set_template(template),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="comes? before encode"):
            late()


def test_images_become_pictures_and_bytes_again() -> None:
    from PIL import Image

    picture = Image.new("RGB", (3, 2), (250, 0, 0))
    dataset = Dataset(DatasetMeta(data=[{"image": [picture], "n": 1}]))
    dataset.cast_column("image", decode=False)
    assert dataset[0]["image"][0]["bytes"].startswith(b"\x89PNG")
    dataset.cast_column("image")
    assert dataset[0]["image"][0].getpixel((0, 0)) == (250, 0, 0)
    with pytest.raises(DataError, match="no column 'photo'"):
        dataset.cast_column("photo")


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), modulus=st.integers(2, 4), mix=st.sampled_from([None, True, False]))
def test_lazy_gives_what_eager_gives(template: Any, lengths: list[int], modulus: int, mix: bool | None) -> None:
    results = []
    for cls in (Dataset, LazyDataset):
        dataset = cls(DatasetMeta(data=chats(lengths)))
        dataset.map(shout)
        dataset.filter(lambda row: len(row["messages"][1]["content"]) % modulus != 0)
        if mix is not None:
            dataset.add_dataset(DatasetMeta(data=chats([1, 2], 100)))
            dataset.mix_dataset(mix)
        dataset.filter("LengthFilter", init_args={"min_chars": 5})
        dataset.map(shout)
        rows = [row["messages"] for row in dataset]
        dataset.set_template(template)
        if len(dataset):
            dataset.encode()
        results.append(
            (rows, plain(dataset), plain(dataset), [(part["rows"], part["filtered"]) for part in dataset.report["sources"].values()])
        )
    assert results[0] == results[1]


def shout(row: dict[str, Any]) -> dict[str, Any]:
    """Changes its argument, as functions of users do."""
    row["messages"][1]["content"] += "!"
    return row


def test_lazy_work_is_done_when_a_row_is_read(template: Any) -> None:
    seen = []
    dataset = LazyDataset(DatasetMeta(data=[*chats([1, 2]), {"messages": [{"role": "robot", "content": "?"}]}]))
    dataset.map(lambda row: seen.append(1) or row)
    dataset.set_template(template)
    dataset.encode()
    assert seen == []
    assert dataset[1]["length"] == FRAME_TOKENS + 5
    assert len(seen) == 1
    with pytest.raises(DataError, match="rows in memory, row 3: .*robot"):
        dataset[2]


def test_lazy_check_leaves_bad_rows_out(template: Any) -> None:
    dataset = LazyDataset(DatasetMeta(data=[{"q": 1}, *chats([1])]))
    dataset.map(lambda row: row)
    dataset.set_template(template)
    dataset.check()
    dataset.encode()
    assert len(dataset) == 1
    assert dataset.report["refused"] == 1


@pytest.mark.parametrize("rule", ["split", "delete"])
def test_lazy_refuses_rules_that_change_the_number_of_rows(rule: str, tokenizer: Path) -> None:
    dataset = LazyDataset(DatasetMeta(data=chats([1])))
    dataset.set_template("Template", model_id=tokenizer, truncation_strategy=rule)
    with pytest.raises(ConfigError, match=rule):
        dataset.encode()
