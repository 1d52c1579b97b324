"""Rows -> batches, in an order that can be computed."""

from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.dataloader.order import permutation, rank_slice, token_batches, windowed_permutation

__all__ = ["DataLoader", "permutation", "rank_slice", "token_batches", "windowed_permutation"]
