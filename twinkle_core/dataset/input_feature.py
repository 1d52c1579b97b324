"""One sample or packed row as the mapping that users' training loops take."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import numpy as np

from twinkle_core.template.multimodal import MultimodalSample
from twinkle_core.types import DocumentKind, EncodedSample, Message, PackedRow


class InputFeature(TypedDict):
    """T tokens of D documents, laid end to end.

    Example: two documents of 3 and 2 tokens have `length` 5, `seq_lens` [3, 2] and `position_ids` [0, 1, 2, 0, 1].
    """

    input_ids: np.ndarray
    """[T] int32 token ids."""
    labels: np.ndarray
    """[T] int32: the token that each position must predict (already shifted), or -100 where it predicts nothing."""
    position_ids: np.ndarray
    """[T] int32, from 0 in each document; [3, T] (time, height, width) where there are images."""
    seq_lens: np.ndarray
    """[D] int32 lengths of the documents, sum T."""
    length: int
    """T."""
    kinds: NotRequired[np.ndarray]
    """[D] int8 `DocumentKind`s, where one is not PLAIN."""
    loss_weights: NotRequired[np.ndarray]
    """[T] float32 weight of each label's loss, where not all are 1."""
    pixel_values: NotRequired[np.ndarray]
    """[P, C] float32 patches of all images, as in `MultimodalSample`."""
    image_grid_thw: NotRequired[np.ndarray]
    """[I, 3] int64 patches of each image in time, height and width."""
    messages: NotRequired[list[Message]]
    """A prompt that is to be answered, as it was encoded; with `tools` and `user_data` where it has them."""
    tools: NotRequired[list[dict[str, Any]]]
    user_data: NotRequired[list[tuple[str, str]]]


def input_feature(row: EncodedSample | PackedRow | MultimodalSample) -> InputFeature:
    """The row as an `InputFeature`. Arrays are the row's own, not copies."""
    lengths = np.asarray(row.seq_lens, dtype=np.int32)
    feature: InputFeature = {
        "input_ids": row.input_ids,
        "labels": row.labels,
        "position_ids": row.position_ids if isinstance(row, MultimodalSample) else _positions(lengths),
        "seq_lens": lengths,
        "length": len(row.input_ids),
    }
    if np.any(row.kinds != DocumentKind.PLAIN):
        feature["kinds"] = row.kinds
    if row.loss_weights is not None:
        feature["loss_weights"] = row.loss_weights
    if isinstance(row, MultimodalSample):
        feature["pixel_values"], feature["image_grid_thw"] = row.pixel_values, row.image_grid_thw
    return feature


def encoded_sample(feature: InputFeature) -> EncodedSample | MultimodalSample:
    """The row that an `InputFeature` was made of. Raises `ValueError` where its arrays do not fit together."""
    kinds, weights = feature.get("kinds"), feature.get("loss_weights")
    lengths = np.asarray(feature["seq_lens"], dtype=np.int32)
    fields: dict[str, Any] = {
        "input_ids": np.asarray(feature["input_ids"], dtype=np.int32),
        "labels": np.asarray(feature["labels"], dtype=np.int32),
        "seq_lens": lengths,
        "kinds": np.zeros(len(lengths), dtype=np.int8) if kinds is None else np.asarray(kinds, dtype=np.int8),
        "loss_weights": None if weights is None else np.asarray(weights, dtype=np.float32),
    }
    if "pixel_values" not in feature:
        return EncodedSample(**fields)
    names = ("position_ids", "pixel_values", "image_grid_thw")
    return MultimodalSample(**fields, **{name: np.asarray(feature[name]) for name in names})  # type: ignore[literal-required]


def _positions(lengths: np.ndarray) -> np.ndarray:
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    positions: np.ndarray = np.arange(int(lengths.sum()), dtype=np.int32) - np.repeat(starts, lengths)
    return positions
