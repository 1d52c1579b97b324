"""Source rows -> `Trajectory`: formats, preprocessors, split."""

from twinkle_core.preprocessor.run import preprocess, read_trajectories
from twinkle_core.preprocessor.self_cognition import SelfCognitionProcessor

__all__ = ["SelfCognitionProcessor", "preprocess", "read_trajectories"]
