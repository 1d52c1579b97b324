"""Models to train. `TransformersModel` is the driver's side: it imports no torch until it is built."""

from twinkle_core.model.transformers import TRANSFORMERS_WORKER, TransformersModel

__all__ = ["TRANSFORMERS_WORKER", "TransformersModel"]
