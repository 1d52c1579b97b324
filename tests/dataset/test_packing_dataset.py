import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dataset.chats import FRAME_TOKENS, chats, ids, plain
from twinkle_core.dataset import Dataset, DatasetMeta, IterablePackingDataset, PackingDataset
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.packing import pack
from twinkle_core.packing.windows import pack_windows

LENGTHS = st.lists(st.integers(0, 150), min_size=1, max_size=30)


def packed(lengths: list[int], template: Any, packing_num_proc: int = 1) -> PackingDataset:
    dataset = PackingDataset(DatasetMeta(data=chats(lengths)), packing_num_proc)
    dataset.set_template(template)
    dataset.encode()
    dataset.pack_dataset()
    return dataset


def documents(features: Any) -> list[tuple[list[int], list[int], list[int]]]:
    """Ids, labels and positions of every document."""
    found = []
    for feature in features:
        ends = np.cumsum(feature["seq_lens"])[:-1]
        parts = [np.split(feature[name], ends) for name in ("input_ids", "labels", "position_ids")]
        found += [tuple(part.tolist() for part in document) for document in zip(*parts, strict=True)]
    return found


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS)
def test_each_sample_is_in_one_row_with_its_own_positions(template: Any, lengths: list[int]) -> None:
    dataset = packed(lengths, template)
    single = Dataset(DatasetMeta(data=chats(lengths)))
    single.set_template(template)
    single.encode()
    assert sorted(documents(dataset)) == sorted(documents(single))
    assert all(feature["length"] <= 200 for feature in dataset)
    assert len(dataset) == len(pack(np.array([FRAME_TOKENS + 3 + length for length in lengths]), 200))
    assert dataset.report["fill"] == round(dataset.report["tokens"] / (200 * len(dataset)), 6)


def test_the_plan_does_not_depend_on_packing_num_proc(template: Any) -> None:
    lengths = [number * 37 % 150 for number in range(60)]
    assert plain(packed(lengths, template)) == plain(packed(lengths, template, packing_num_proc=4))


def test_samples_are_not_handed_out_for_rows(template: Any) -> None:
    for cls in (PackingDataset, IterablePackingDataset):
        dataset = cls(DatasetMeta(data=chats([1, 2])))
        with pytest.raises(ConfigError, match="pack_dataset comes after encode"):
            dataset.pack_dataset()
        dataset.set_template(template)
        dataset.encode()
        with pytest.raises(ConfigError, match="call pack_dataset"):
            next(iter(dataset))
        dataset.pack_dataset()
        assert sum(len(feature["seq_lens"]) for feature in dataset) == 2


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (PackingDataset, {"packing_num_proc": 0}),
        (IterablePackingDataset, {"packing_interval": 0}),
        (IterablePackingDataset, {"packing_num_proc": 0}),
    ],
)
def test_numbers_below_one_are_refused(cls: Any, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        cls(DatasetMeta(data=chats([1])), **arguments)


def test_prompts_are_not_packed(template: Any) -> None:
    for cls in (PackingDataset, IterablePackingDataset):
        dataset = cls(DatasetMeta(data=[{"messages": [{"role": "user", "content": "?"}]}]))
        dataset.set_template(template)
        dataset.encode(add_generation_prompt=True)
        with pytest.raises(ConfigError, match="prompts are"):
            dataset.pack_dataset()


def stream(
    lengths: list[int], template: Any, interval: int, *, second: list[int] | None = None, cyclic: bool = False
) -> IterablePackingDataset:
    """Of both sources, without the answers of seven characters."""
    dataset = IterablePackingDataset(DatasetMeta(data=chats(lengths)), packing_interval=interval, cyclic=cyclic)
    if second:
        dataset.add_dataset(DatasetMeta(data=chats(second, 100)))
        dataset.mix_dataset()
    dataset.filter(lambda row: len(row["messages"][1]["content"]) != 7)
    dataset.set_template(template)
    dataset.encode()
    dataset.pack_dataset()
    return dataset


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, interval=st.integers(1, 12))
def test_a_stream_is_packed_window_by_window(template: Any, lengths: list[int], interval: int) -> None:
    kept = [row for row in chats(lengths) if len(row["messages"][1]["content"]) != 7]
    samples = [sample.input_ids.tolist() for sample in template.batch_encode(kept)]
    plans = pack_windows(map(len, samples), 200, interval)
    expected = [[token for number in row for token in samples[number]] for plan in plans for row in plan]
    assert ids(stream(lengths, template, interval)) == expected


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, second=st.lists(st.integers(0, 150), max_size=10), interval=st.integers(1, 12), data=st.data())
def test_a_packed_stream_stopped_anywhere_goes_on_as_if_it_were_not(
    template: Any, lengths: list[int], second: list[int], interval: int, data: st.DataObject
) -> None:
    def made() -> IterablePackingDataset:
        return stream(lengths, template, interval, second=second)

    whole = made()
    rows = plain(whole)
    first, other = made(), made()
    loop = iter(first)
    before = plain(next(loop) for _ in range(data.draw(st.integers(0, len(rows)))))
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + plain(other) == rows
    assert other.report == whole.report
    assert plain(other) == rows, "and the next pass is whole"
    assert sum(len(row["seq_lens"]) for row in rows) == sum(length != 7 for length in lengths + second)


def test_cyclic_passes_never_end_and_resume_in_any_of_them(template: Any) -> None:
    lengths = [number * 37 % 150 for number in range(23)]
    one_pass = plain(stream(lengths, template, 5))
    dataset = stream(lengths, template, 5, cyclic=True)
    count = len(one_pass)
    loop = iter(dataset)
    for stop in range(1, 3 * count):
        assert plain([next(loop)])[0] == one_pass[(stop - 1) % count]
        other = stream(lengths, template, 5, cyclic=True)
        other.load_state_dict(dataset.state_dict())
        assert plain(islice(other, 2)) == [one_pass[stop % count], one_pass[(stop + 1) % count]]


def test_cyclic_passes_without_a_sample_end_with_an_error(template: Any) -> None:
    with pytest.raises(DataError, match="no sample"):
        next(iter(stream([7, 7], template, 5, cyclic=True)))


def test_rows_cut_into_several_samples_are_carried_and_resumed(tokenizer: Any) -> None:
    def made() -> IterablePackingDataset:
        dataset = IterablePackingDataset(DatasetMeta(data=chats([30, 5, 70, 0, 41, 12])), packing_interval=2)
        dataset.set_template("Template", model_id=tokenizer, max_length=40, truncation_strategy="split")
        dataset.encode()
        dataset.pack_dataset()
        return dataset

    whole = made()
    rows = plain(whole)
    assert whole.report["samples"] > whole.report["encoded"] == 6
    for stop in range(len(rows) + 1):
        first, other = made(), made()
        loop = iter(first)
        before = plain(next(loop) for _ in range(stop))
        other.load_state_dict(first.state_dict())
        assert before + plain(other) == rows
