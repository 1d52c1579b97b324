import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dataset.chats import FRAME_TOKENS, chats, ids, plain
from twinkle_core.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle_core.dataset.iterable_dataset import LOOK_AHEAD_ROWS
from twinkle_core.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=20)


def short(row: dict[str, Any]) -> bool:
    return len(row["messages"][1]["content"]) % 5 != 0


def shout(row: dict[str, Any]) -> dict[str, Any]:
    """Changes its argument, as functions of users do."""
    row["messages"][1]["content"] += "!"
    return row


def made(cls: Any, lengths: list[int], second: list[int], interleave: bool, tokenizer: Path, rule: str = "split") -> Any:
    """Maps and filters before and after two sources are mixed; what is longer than 20 tokens of answer is cut or dropped."""
    dataset = cls(DatasetMeta(data=chats(lengths)))
    dataset.filter(short)
    dataset.add_dataset(DatasetMeta(data=chats(second, 100), data_slice=range(0, len(second), 2)))
    dataset.mix_dataset(interleave)
    dataset.map(shout)
    dataset.filter(lambda row: len(row["messages"][1]["content"]) != 9)
    dataset.set_template("Template", model_id=tokenizer, max_length=FRAME_TOKENS + 23, truncation_strategy=rule)
    dataset.encode()
    return dataset


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, second=LENGTHS, interleave=st.booleans(), rule=st.sampled_from(["split", "delete", "right"]), data=st.data())
def test_a_stream_gives_what_the_dataset_gives_and_goes_on_wherever_it_stopped(
    tokenizer: Path, lengths: list[int], second: list[int], interleave: bool, rule: str, data: st.DataObject
) -> None:
    arguments = (lengths, second, interleave, tokenizer, rule)
    whole = made(IterableDataset, *arguments)
    features = plain(whole)
    if features:
        eager = made(Dataset, *arguments)
        assert features == plain(eager)
        assert whole.report == eager.report
    stop = data.draw(st.integers(0, len(features)))
    first, other = made(IterableDataset, *arguments), made(IterableDataset, *arguments)
    loop = iter(first)
    before = plain(next(loop) for _ in range(stop))
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert other.state_dict() == first.state_dict()
    assert before + plain(other) == features
    assert other.report == whole.report
    assert plain(other) == features, "and the next pass is whole"


@pytest.mark.parametrize("interleave", [True, False])
def test_three_sources_take_turns_as_in_a_dataset(interleave: bool) -> None:
    results = []
    for cls in (Dataset, IterableDataset):
        dataset = cls(DatasetMeta(data=chats([1, 1])))
        dataset.add_dataset(DatasetMeta(data=chats([1] * 5, 100)))
        dataset.add_dataset(DatasetMeta(data=chats([1] * 3, 200)))
        dataset.mix_dataset(interleave)
        results.append([row["messages"][0]["content"] for row in dataset])
    in_turns = ["000", "100", "200", "001", "101", "201", "102", "202", "103", "104"]
    assert results[0] == results[1] == (in_turns if interleave else sorted(in_turns))


def test_a_loop_begins_anew_and_a_finished_one_leaves_the_start_of_the_next(template: Any) -> None:
    dataset = IterableDataset(DatasetMeta(data=chats([1, 2, 3])))
    dataset.set_template(template)
    dataset.encode()
    start = dataset.state_dict()
    next(iter(dataset))
    assert dataset.state_dict() != start
    assert len(list(dataset)) == 3
    assert dataset.state_dict() == start
    assert dataset.report["samples"] == 3
    assert not hasattr(dataset, "__len__")


def test_two_loops_at_once_are_refused(template: Any) -> None:
    dataset = IterableDataset(DatasetMeta(data=chats([1, 2, 3])))
    first = iter(dataset)
    next(first)
    next(iter(dataset))
    with pytest.raises(ConfigError, match="another loop"):
        next(first)


def test_rows_come_as_they_are_before_encode() -> None:
    dataset = IterableDataset(DatasetMeta(data=chats([5, 2, 3])))
    dataset.filter(short)
    assert list(dataset) == [chats([5, 2, 3])[1], chats([5, 2, 3])[2]]
    assert dataset.report["filtered"] == 1


def test_few_rows_are_read_ahead_and_passed_rows_are_not_converted(template: Any) -> None:
    read, mapped = [], []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(10_000):
            read.append(number)
            yield chats([1], number)[0]

    def opened() -> IterableDataset:
        dataset = IterableDataset(DatasetMeta(data=rows))
        dataset.map(lambda row: mapped.append(1) or row)
        dataset.set_template(template)
        dataset.encode()
        return dataset

    dataset = opened()
    loop = iter(dataset)
    for _ in range(100):
        next(loop)
    assert len(read) <= 100 + LOOK_AHEAD_ROWS
    state = dataset.state_dict()
    read.clear()
    mapped.clear()
    other = opened()
    other.load_state_dict(state)
    assert ids([next(iter(other))]) == ids([next(loop)])
    assert len(read) <= 100 + LOOK_AHEAD_ROWS
    assert len(mapped) <= LOOK_AHEAD_ROWS


@pytest.mark.parametrize("bad", [{"messages": [{"role": "robot", "content": "?"}]}, {"messages": None}])
def test_rows_before_a_bad_one_are_given(bad: dict[str, Any], template: Any) -> None:
    def opened(check: bool) -> IterableDataset:
        dataset = IterableDataset(DatasetMeta(data=[*chats([1, 2]), bad, *chats([3])]))
        dataset.map(lambda row: {**row, "n": len(row["messages"])})
        dataset.set_template(template)
        if check:
            dataset.check()
        dataset.encode()
        return dataset

    loop = iter(opened(check=False))
    assert [feature["length"] - FRAME_TOKENS - 3 for feature in (next(loop), next(loop))] == [1, 2]
    with pytest.raises((DataError, TypeError)) as caught:
        next(loop)
    assert "row 3" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    if bad["messages"]:
        checked = opened(check=True)
        assert len(list(checked)) == 3
        assert checked.report["refused"] == 1


def test_a_state_of_something_else_is_refused(template: Any) -> None:
    dataset = IterableDataset(DatasetMeta(data=chats([1])))
    for state in ({}, {"rows": {}}, [], {**dataset.state_dict(), "rows": {"other.jsonl": 1}}):
        with pytest.raises(ConfigError, match="no state of a IterableDataset"):
            dataset.load_state_dict(state)  # type: ignore[arg-type]


def test_a_source_that_became_shorter_is_refused(template: Any) -> None:
    state = {**IterableDataset(DatasetMeta(data=chats([1]))).state_dict(), "rows": {"rows in memory": 5}}
    dataset = IterableDataset(DatasetMeta(data=chats([1])))
    dataset.load_state_dict(state)
    with pytest.raises(DataError, match="has 1 rows, but 5 were read"):
        next(iter(dataset))


def test_sources_have_to_be_mixed(template: Any) -> None:
    dataset = IterableDataset(DatasetMeta(data=chats([1])))
    dataset.add_dataset(DatasetMeta(data=chats([2])))
    with pytest.raises(ConfigError, match="mix_dataset"):
        iter(dataset)
