"""Rows -> model inputs."""

from twinkle_core.processor.base import InputProcessor

__all__ = ["InputProcessor"]
