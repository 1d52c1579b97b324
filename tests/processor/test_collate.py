from __future__ import annotations

import numpy as np
import pytest

from twinkle_core.errors import DataError
from twinkle_core.processor import InputProcessor
from twinkle_core.types import IGNORE, EncodedSample, PackedRow


def test_documents_lie_end_to_end_with_positions_of_their_own_and_no_padding() -> None:
    packed = PackedRow(
        input_ids=np.array([1, 2, 3, 4, 5], dtype=np.int32), labels=np.array([2, 3, IGNORE, 5, IGNORE], dtype=np.int32),
        seq_lens=np.array([3, 2], dtype=np.int32), sample_ids=np.array([0, 1]),
    )  # fmt: skip
    single = EncodedSample(input_ids=np.array([6, 2], dtype=np.int32), labels=np.array([2, IGNORE], dtype=np.int32))
    batch = InputProcessor().collate([packed, single])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 2]]
    assert batch["labels"].tolist() == [[2, 3, IGNORE, 5, IGNORE, 2, IGNORE]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["seq_lens"] == [3, 2, 2]
    assert {str(batch[name].dtype) for name in ("input_ids", "labels", "position_ids")} == {"torch.int64"}


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="no rows to collate"):
        InputProcessor().collate([])
