"""Source rows -> `Trajectory`: layouts, preprocessors, filters, duplicates, split and mix."""

from twinkle_core.preprocessor.base import DataFilter, Preprocessor
from twinkle_core.preprocessor.filters import (
    CharRepetitionFilter,
    LengthFilter,
    RefusalFilter,
    RoleOrderFilter,
    SpecialCharacterFilter,
    WordRepetitionFilter,
)
from twinkle_core.preprocessor.instructions import AlpacaProcessor, EmojiDPOProcessor
from twinkle_core.preprocessor.pii import PIIFilter
from twinkle_core.preprocessor.reasoning import (
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    GSM8KProcessor,
    OlympiadBenchProcessor,
)
from twinkle_core.preprocessor.run import preprocess, read_trajectories
from twinkle_core.preprocessor.self_cognition import SelfCognitionProcessor

__all__ = [
    "AlpacaProcessor",
    "CLEVRProcessor",
    "CharRepetitionFilter",
    "CompetitionMathGRPOProcessor",
    "CompetitionMathProcessor",
    "CountdownProcessor",
    "DataFilter",
    "EmojiDPOProcessor",
    "GSM8KProcessor",
    "LengthFilter",
    "OlympiadBenchProcessor",
    "PIIFilter",
    "Preprocessor",
    "RefusalFilter",
    "RoleOrderFilter",
    "SelfCognitionProcessor",
    "SpecialCharacterFilter",
    "WordRepetitionFilter",
    "preprocess",
    "read_trajectories",
]
