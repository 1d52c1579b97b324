"""Sources of rows, under the name that users look for. They live below, since the preprocess stage reads them."""

from twinkle_core.preprocessor.sources import FileSource, ReasoningGymSource, Source, open_source

__all__ = ["FileSource", "ReasoningGymSource", "Source", "open_source"]
