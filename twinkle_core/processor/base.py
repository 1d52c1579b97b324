"""Rows -> what a model's forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.types import EncodedSample, PackedRow


class InputProcessor:
    """Lays rows end to end, without padding: there is no pad token, so none can be mistaken for the end of a turn."""

    def collate(self, rows: Sequence[PackedRow | EncodedSample]) -> dict[str, Any]:
        """`input_ids`, `labels` (already shifted) and `position_ids`, torch int64 [1, T], and `seq_lens`, a list of D ints.

        T is the number of tokens of all rows and D that of their documents; positions start at 0 in each document.
        Example: documents of 3 and 2 tokens give `position_ids == [[0, 1, 2, 0, 1]]` and `seq_lens == [3, 2]`.
        """
        import torch

        if not rows:
            raise DataError("no rows to collate: a micro-batch has at least one row")
        seq_lens = np.concatenate([row.seq_lens for row in rows]).astype(np.int64)
        starts = np.cumsum(seq_lens) - seq_lens
        positions = np.arange(int(seq_lens.sum()), dtype=np.int64) - np.repeat(starts, seq_lens)
        arrays = {
            "input_ids": np.concatenate([row.input_ids for row in rows]).astype(np.int64),
            "labels": np.concatenate([row.labels for row in rows]).astype(np.int64),
            "position_ids": positions,
        }
        return {**{name: torch.from_numpy(array)[None] for name, array in arrays.items()}, "seq_lens": seq_lens.tolist()}
