"""What users hand to a model -> rows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from twinkle_core.dataset.input_feature import InputFeature, encoded_sample
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.types import EncodedSample, PackedRow, Trajectory

if TYPE_CHECKING:
    from twinkle_core.template.base import Template

Row = PackedRow | EncodedSample
Input = Row | InputFeature | Trajectory | Mapping[str, Any]


def as_rows(inputs: Input | Sequence[Input], template: Template | None) -> list[Any]:
    """Rows as they are, `InputFeature`s, or raw trajectories, which the template encodes; one of them or a list."""
    items: Sequence[Any] = [inputs] if isinstance(inputs, (Mapping, PackedRow, EncodedSample)) else cast("Sequence[Any]", inputs)
    return [_as_row(item, number, template) for number, item in enumerate(items)]


def _as_row(item: Any, number: int, template: Template | None) -> Any:
    if not isinstance(item, Mapping):
        return item
    if "input_ids" in item:
        return encoded_sample(cast(InputFeature, _with_lengths(item, number)))
    if not {"messages", "text", "embedding"} & item.keys():
        raise DataError(
            f"input {number} has the fields {', '.join(map(str, item))}: it is neither a row (input_ids) nor a trajectory (messages)"
        )
    if template is None:
        raise ConfigError(f"input {number} is a raw trajectory: call set_template first, or encode it")
    return template.encode(cast(Trajectory, item))


def _with_lengths(feature: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """With `seq_lens`; where it has none, documents start where its positions do."""
    if "labels" not in feature:
        raise DataError(f"input {number} has input_ids but no labels (shifted: what each position must predict, -100 for nothing)")
    if "seq_lens" in feature:
        return feature
    tokens = len(np.asarray(feature["input_ids"]).reshape(-1))
    positions = feature.get("position_ids")
    starts = np.array([0]) if positions is None else np.flatnonzero(np.asarray(positions).reshape(-1) == 0)
    flat = {name: np.asarray(feature[name]).reshape(-1) for name in ("input_ids", "labels", "loss_weights") if name in feature}
    kinds = {"kinds": feature["kinds"]} if "kinds" in feature else {}
    return {**flat, **kinds, "seq_lens": np.diff(np.append(starts, tokens)).astype(np.int32)}
