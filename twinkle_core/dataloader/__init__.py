"""Rows -> batches, in an order that can be computed."""

from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.dataloader.order import permutation

__all__ = ["DataLoader", "permutation"]
