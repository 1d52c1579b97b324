import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.dataset import encoded_sample, input_feature
from twinkle_core.dataset.columns import SampleColumns, packed_row
from twinkle_core.types import IGNORE, DocumentKind, EncodedSample


@st.composite
def samples(draw: st.DrawFn) -> EncodedSample:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    tokens = sum(lengths)
    numbers = st.lists(st.integers(0, 9), min_size=tokens, max_size=tokens)
    kinds = draw(st.lists(st.sampled_from(DocumentKind), min_size=len(lengths), max_size=len(lengths)))
    weights = draw(st.none() | numbers)
    return EncodedSample(
        input_ids=np.array(draw(numbers), dtype=np.int32),
        labels=np.array(draw(numbers), dtype=np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        kinds=np.array(kinds, dtype=np.int8),
        loss_weights=None if weights is None else np.array(weights, dtype=np.float32),
    )


def fields(sample: EncodedSample) -> list[object]:
    names = ("input_ids", "labels", "seq_lens", "kinds", "loss_weights")
    values = [getattr(sample, name) for name in names]
    return [None if value is None else (value.dtype, value.tolist()) for value in values]


def test_positions_restart_at_each_document() -> None:
    feature = input_feature(
        EncodedSample(
            input_ids=np.arange(5, dtype=np.int32), labels=np.full(5, IGNORE, dtype=np.int32), seq_lens=np.array([3, 2], dtype=np.int32)
        )
    )
    assert feature["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert feature["length"] == 5
    assert feature.keys() == {"input_ids", "labels", "position_ids", "seq_lens", "length"}


@given(samples())
def test_a_feature_is_its_sample(sample: EncodedSample) -> None:
    assert fields(encoded_sample(input_feature(sample))) == fields(sample)


def test_arrays_that_do_not_fit_are_refused() -> None:
    feature = input_feature(EncodedSample(input_ids=np.arange(3, dtype=np.int32), labels=np.arange(3, dtype=np.int32)))
    with pytest.raises(ValueError, match="3 input ids but 2 labels"):
        encoded_sample({**feature, "labels": feature["labels"][:2]})


@given(st.lists(samples(), min_size=1, max_size=8), st.integers(1, 4))
def test_columns_give_each_sample_back(given_samples: list[EncodedSample], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twinkle_core.dataset.columns._CHUNK", chunk)
        columns = SampleColumns()
        for sample in given_samples:
            columns.append(sample)
        assert len(columns) == len(given_samples)
        assert [fields(columns[number]) for number in range(len(columns))] == [fields(sample) for sample in given_samples]
        assert columns.lengths().tolist() == [len(sample.input_ids) for sample in given_samples]
        with pytest.raises(IndexError):
            columns[len(columns)]


@given(st.lists(samples(), min_size=1, max_size=5))
def test_a_packed_row_holds_every_token_once(given_samples: list[EncodedSample]) -> None:
    row = packed_row(given_samples, range(7, 7 + len(given_samples)))
    assert row.input_ids.tolist() == [token for sample in given_samples for token in sample.input_ids.tolist()]
    assert row.sample_ids.tolist() == [number for number, sample in enumerate(given_samples, start=7) for _ in sample.seq_lens]
    assert row.loss_weight == sum(sample.loss_weight for sample in given_samples)
    assert row.num_loss_tokens == sum(sample.num_loss_tokens for sample in given_samples)
