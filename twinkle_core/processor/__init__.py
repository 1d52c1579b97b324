"""Rows -> model inputs."""

from twinkle_core.processor.base import InputProcessor, Row

__all__ = ["InputProcessor", "Row"]
