"""Sources of rows, under the name that users look for. They live below, since the preprocess stage reads them."""

from twinkle_core.preprocessor.sources import FileSource, HubSource, Place, ReasoningGymSource, RowsSource, Source, open_source

__all__ = ["FileSource", "HubSource", "Place", "ReasoningGymSource", "RowsSource", "Source", "open_source"]
