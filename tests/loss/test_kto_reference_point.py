"""KTO's reference point, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from twinkle_core.errors import DataError
from twinkle_core.loss.kto_reference_point import mismatched, reference_point
from twinkle_core.types import IGNORE, PackedRow

_ = IGNORE


def packed(ids: list[int], labels: list[int], *lengths: int) -> PackedRow:
    return PackedRow(
        input_ids=np.array(ids, dtype=np.int32),
        labels=np.array(labels, dtype=np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        sample_ids=np.arange(len(lengths), dtype=np.int64),
    )


def test_each_prompt_gets_the_answer_before_it() -> None:
    first = packed([1, 2, 3, 4, 9, 8, 7], [_, 3, 4, _, _, 7, _], 4, 3)  # 1 2 | 3 4, and 9 8 | 7
    second = packed([5, 6, 60, 61], [6, _, 61, _], 4)  # 5 | 6 60 61, of which 60 is not learnt
    found = mismatched([first, packed([1, 1], [_, _], 2), second])
    assert [row.input_ids.tolist() for row in found] == [[1, 2, 6, 60, 61], [9, 8, 3, 4], [5, 7]]
    assert [row.labels.tolist() for row in found] == [[_, 6, _, 61, _], [_, 3, 4, _], [7, _]]
    assert [row.seq_lens.tolist() for row in found] == [[5], [4], [2]]
    for row in found:
        taken = np.flatnonzero(row.labels != IGNORE)
        np.testing.assert_array_equal(row.labels[taken], row.input_ids[taken + 1])  # a label is the token after it
    with pytest.raises(DataError, match="1 documents of the batch have a supervised token"):
        mismatched([second])


def test_the_point_is_the_mean_of_the_summed_differences_and_never_below_zero() -> None:
    policy = [np.array([-1.0, -2.0]), np.array([-0.5])]
    reference = [np.array([-2.0, -2.5]), np.array([-0.25])]
    assert reference_point(policy, reference) == (1.5 - 0.25) / 2
    assert reference_point(reference, policy) == 0.0
    with pytest.raises(DataError, match="2 and 1 documents"):
        reference_point(policy, reference[:1])
    with pytest.raises(DataError, match="of the same labels"):
        reference_point(policy, [policy[1], policy[0]])
    with pytest.raises(DataError, match="reference point is nan"):
        reference_point([np.array([np.nan])], [np.array([0.0])])
