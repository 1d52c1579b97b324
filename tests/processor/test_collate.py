from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.processor import InputProcessor
from twinkle_core.template.multimodal import MultimodalSample, mrope_positions
from twinkle_core.types import IGNORE, EncodedSample, PackedRow

CASE = Path(__file__).parents[2].parent / "shared" / "cases" / "TM07"
IMAGE = 9


def packed(*lengths: int, weights: list[float] | None = None) -> PackedRow:
    total = sum(lengths)
    return PackedRow(
        input_ids=np.arange(1, total + 1, dtype=np.int32), labels=np.arange(2, total + 2, dtype=np.int32),
        seq_lens=np.array(lengths, dtype=np.int32), sample_ids=np.arange(len(lengths)),
        loss_weights=None if weights is None else np.array(weights, dtype=np.float32),
    )  # fmt: skip


def with_image(before: int, after: int) -> MultimodalSample:
    """One image of 4 x 4 patches, merged 2 x 2 to 4 tokens, between texts."""
    ids = np.array([1] * before + [IMAGE] * 4 + [2] * after, dtype=np.int32)
    grid = np.array([[1, 4, 4]], dtype=np.int64)
    return MultimodalSample(
        input_ids=ids, labels=np.full(len(ids), IGNORE, dtype=np.int32), seq_lens=np.array([len(ids)], dtype=np.int32),
        kinds=np.zeros(1, dtype=np.int8), position_ids=mrope_positions(ids == IMAGE, grid, 2),
        pixel_values=np.full((16, 3), before, dtype=np.float32), image_grid_thw=grid,
    )  # fmt: skip


def test_documents_lie_end_to_end_with_positions_of_their_own_and_no_padding() -> None:
    row = PackedRow(
        input_ids=np.array([1, 2, 3, 4, 5], dtype=np.int32), labels=np.array([2, 3, IGNORE, 5, IGNORE], dtype=np.int32),
        seq_lens=np.array([3, 2], dtype=np.int32), sample_ids=np.array([0, 1]),
    )  # fmt: skip
    single = EncodedSample(input_ids=np.array([6, 2], dtype=np.int32), labels=np.array([2, IGNORE], dtype=np.int32))
    batch = InputProcessor().collate([row, single])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 2]]
    assert batch["labels"].tolist() == [[2, 3, IGNORE, 5, IGNORE, 2, IGNORE]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["seq_lens"] == [3, 2, 2]
    assert {str(batch[name].dtype) for name in ("input_ids", "labels", "position_ids")} == {"torch.int64"}
    assert batch.keys() == {"input_ids", "labels", "position_ids", "seq_lens"}


def test_weights_are_there_where_some_row_has_them_and_one_elsewhere() -> None:
    batch = InputProcessor().collate([packed(2), packed(3, weights=[0.5, 0.0, 2.0])])
    assert batch["loss_weights"].tolist() == [[1.0, 1.0, 0.5, 0.0, 2.0]]
    assert str(batch["loss_weights"].dtype) == "torch.float32"
    lines = InputProcessor().padded([packed(2), packed(3, weights=[0.5, 0.0, 2.0])], pad_token_id=0)
    assert lines["loss_weights"].tolist() == [[1.0, 1.0, 0.0], [0.5, 0.0, 2.0]]


def test_images_come_in_the_order_of_their_tokens_with_positions_in_three_axes() -> None:
    rows = [with_image(1, 2), packed(2), with_image(3, 1)]
    batch = InputProcessor().collate(rows)
    assert batch["position_ids"].shape == (3, 1, 7 + 2 + 8)
    assert batch["position_ids"][:, 0].tolist() == [
        [0, 1, 1, 1, 1, 3, 4, 0, 1, 0, 1, 2, 3, 3, 3, 3, 5],
        [0, 1, 1, 2, 2, 3, 4, 0, 1, 0, 1, 2, 3, 3, 4, 4, 5],
        [0, 1, 2, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 3, 4, 5],
    ]
    assert batch["pixel_values"].tolist() == [[1.0] * 3] * 16 + [[3.0] * 3] * 16
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 17)
    assert batch["seq_lens"] == [7, 2, 8]
    lines = InputProcessor().padded(rows, pad_token_id=0)
    assert lines["position_ids"].shape == (3, 3, 8)
    assert lines["position_ids"][:, 1].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0]] * 3
    assert lines["position_ids"][:, 2].tolist() == batch["position_ids"][:, 0, 9:].tolist()


def test_a_stop_token_that_is_also_the_pad_is_learnt_and_pads_are_not() -> None:
    given_, expected = [5, 6, 7, 2, 5, 8, 2], [[IGNORE, 7, 2, IGNORE], [8, 2, IGNORE, IGNORE]]
    row = PackedRow(
        input_ids=np.array(given_, dtype=np.int32), labels=np.array([IGNORE, 7, 2, IGNORE, 8, 2, IGNORE], dtype=np.int32),
        seq_lens=np.array([4, 3], dtype=np.int32), sample_ids=np.array([0, 1]),
    )  # fmt: skip
    batch = InputProcessor().padded([row], pad_token_id=2)
    assert batch["labels"].tolist() == expected
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [5, 8, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    left = InputProcessor().padded([row], pad_token_id=2, padding_side="left")
    assert left["labels"].tolist() == [[IGNORE, 7, 2, IGNORE], [IGNORE, 8, 2, IGNORE]]
    assert left["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert left["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2]]


@pytest.mark.skipif(not CASE.is_dir(), reason="the cases are not beside this checkout")
def test_the_reported_case_of_masking_pads_by_id() -> None:
    files = {path.stem: json.loads(path.read_text()) for path in CASE.glob("*.json")}
    case = next(value for value in files.values() if "input_ids" in value)
    expected = next(value for value in files.values() if "labels_after_padding" in value)["labels_after_padding"]
    rows = []
    for ids, start in zip(case["input_ids"], case["assistant_from"], strict=True):
        learnt = [IGNORE] * start + ids[start:]
        rows.append(EncodedSample(input_ids=np.array(ids, dtype=np.int32), labels=np.array([*learnt[1:], IGNORE], dtype=np.int32)))
    labels = InputProcessor().padded(rows, pad_token_id=case["pad_id"])["labels"].tolist()
    assert [[IGNORE, *line[:-1]] for line in labels] == expected, "the case's labels stand at the token, ours at the one before"


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(0, 5),
    st.sampled_from(["right", "left"]),
)
@settings(max_examples=50, deadline=None)
def test_padding_and_packing_hold_the_same_tokens(rows: list[list[int]], pad: int, side: str) -> None:
    samples = [packed(*lengths) for lengths in rows]
    flat, lines = InputProcessor().collate(samples), InputProcessor().padded(samples, pad, side)  # type: ignore[arg-type]
    taken = lines["attention_mask"].bool()
    for name in ("input_ids", "labels", "position_ids"):
        assert lines[name][taken].tolist() == flat[name][0].tolist()
    assert set(lines["labels"][~taken].tolist()) <= {IGNORE}
    assert taken.sum(1).tolist() == flat["seq_lens"] == [length for lengths in rows for length in lengths]


def test_no_rows_and_unknown_sides_are_refused() -> None:
    with pytest.raises(DataError, match="no rows to collate"):
        InputProcessor().collate([])
    with pytest.raises(DataError, match="no rows to collate"):
        InputProcessor().padded([], 0)
    with pytest.raises(ConfigError, match="padding_side is 'up'"):
        InputProcessor().padded([packed(2)], 0, "up")  # type: ignore[arg-type]
