"""Sources of rows."""

from twinkle_core.dataset.sources import Source, open_source

__all__ = ["Source", "open_source"]
