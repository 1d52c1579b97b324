"""Packed rows in files, and their reader."""

from twinkle_core.sharding.reader import EncodedDataset, PackedDataset
from twinkle_core.sharding.writer import write_shards

__all__ = ["EncodedDataset", "PackedDataset", "write_shards"]
