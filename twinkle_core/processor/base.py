"""Rows -> what a model's forward pass takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.types import IGNORE, EncodedSample, PackedRow

if TYPE_CHECKING:
    from twinkle_core.device_mesh import DeviceMesh
    from twinkle_core.template.multimodal import MultimodalSample

Row: TypeAlias = "PackedRow | EncodedSample | MultimodalSample"


class InputProcessor:
    """Lays rows end to end, without padding: there is no pad token, so none can be mistaken for the end of a turn.

    `padded` is for models that take no packed rows. Both give `loss_weights` (float32, 1 in rows that have none) only where some row
    has weights, and where some row has images `pixel_values` (float32 [P, C], the patches of all images one after the other) and
    `image_grid_thw` (int64 [I, 3], the images in the order of their tokens).

    The arguments are Twinkle's: rows are laid end to end with either `padding_free`, so that `padding_side` has nothing to decide, and the
    model's own mesh cuts them over ranks.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        padding_free: bool = True,
        framework: Literal["transformers", "megatron"] = "transformers",
        padding_side: Literal["right", "left"] = "right",
    ) -> None:
        if framework != "transformers":
            raise ConfigError(f"framework is {framework!r}; known: transformers (models of Megatron are not there)")
        _check_side(padding_side)

    def collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        """`input_ids`, `labels` (already shifted) and `position_ids`, torch int64 [1, T], and `seq_lens`, a list of D ints.

        T is the number of tokens of all rows and D that of their documents; positions start at 0 in each document. Where some row has
        images, `position_ids` is [3, 1, T]: time, height and width, the same in all three for text.
        Example: documents of 3 and 2 tokens give `position_ids == [[0, 1, 2, 0, 1]]` and `seq_lens == [3, 2]`.
        """
        import torch

        arrays, images = _end_to_end(rows)
        tensors = {name: torch.from_numpy(array)[..., None, :] for name, array in arrays.items()}
        tensors |= {name: torch.from_numpy(array) for name, array in images.items()}
        return {**tensors, "seq_lens": np.concatenate([row.seq_lens for row in rows]).tolist()}

    def padded(self, rows: Sequence[Row], pad_token_id: int, padding_side: Literal["right", "left"] = "right") -> dict[str, Any]:
        """`input_ids`, `labels`, `attention_mask` and `position_ids`, torch int64 [D, L]: a line for each document, L the longest's length.

        A pad is known by its place, never by its token: its label is `IGNORE`, its attention, position and weight are 0, and a
        `pad_token_id` that is also the end of a turn is still learnt there. Where some row has images, `position_ids` is [3, D, L].
        """
        import torch

        _check_side(padding_side)
        arrays, images = _end_to_end(rows)
        lengths = np.concatenate([row.seq_lens for row in rows]).astype(np.int64)
        longest = int(lengths.max())
        column = np.arange(longest)
        taken = column < lengths[:, None] if padding_side == "right" else column >= longest - lengths[:, None]
        fill = {"input_ids": pad_token_id, "labels": IGNORE}
        tensors = {"attention_mask": torch.from_numpy(taken.astype(np.int64))}
        for name, array in arrays.items():
            lines = np.full((*array.shape[:-1], *taken.shape), fill.get(name, 0), dtype=array.dtype)
            lines[..., taken] = array
            tensors[name] = torch.from_numpy(lines)
        return tensors | {name: torch.from_numpy(array) for name, array in images.items()}


def _end_to_end(rows: Sequence[Row]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arrays with a last axis of all tokens, and those of the images. Raises `DataError` without rows."""
    if not rows:
        raise DataError("no rows to collate: a micro-batch has at least one row")
    with_images = [row for row in rows if not isinstance(row, (PackedRow, EncodedSample))]

    def joined(of: Callable[[Row], np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([of(row) for row in rows], axis=-1).astype(dtype)

    arrays = {
        "input_ids": joined(lambda row: row.input_ids, np.int64),
        "labels": joined(lambda row: row.labels, np.int64),
        "position_ids": joined(_positions_3 if with_images else _positions, np.int64),
    }
    if any(row.loss_weights is not None for row in rows):
        arrays["loss_weights"] = joined(_weights, np.float32)
    names = ("pixel_values", "image_grid_thw") if with_images else ()
    return arrays, {name: np.concatenate([getattr(row, name) for row in with_images]) for name in names}


def _positions(row: Row) -> np.ndarray:
    """[T], from 0 in each document."""
    lengths = row.seq_lens.astype(np.int64)
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _positions_3(row: Row) -> np.ndarray:
    """[3, T]."""
    if isinstance(row, (PackedRow, EncodedSample)):
        return np.broadcast_to(_positions(row), (3, len(row.input_ids)))
    return row.position_ids


def _weights(row: Row) -> np.ndarray:
    return np.ones(len(row.input_ids), dtype=np.float32) if row.loss_weights is None else row.loss_weights


def _check_side(padding_side: str) -> None:
    if padding_side not in ("right", "left"):
        raise ConfigError(f"padding_side is {padding_side!r}; known: right, left")
