"""The types that travel between the parts, under the import path that Twinkle's users know."""

from twinkle_core.dataset.input_feature import InputFeature, encoded_sample, input_feature
from twinkle_core.types import (
    IGNORE,
    DocumentKind,
    EmbeddingPair,
    EncodedSample,
    Message,
    PackedRow,
    Trajectory,
    kind_of,
    user_data_get,
)

__all__ = [
    "IGNORE",
    "DocumentKind",
    "EmbeddingPair",
    "EncodedSample",
    "InputFeature",
    "Message",
    "PackedRow",
    "Trajectory",
    "encoded_sample",
    "input_feature",
    "kind_of",
    "user_data_get",
]
