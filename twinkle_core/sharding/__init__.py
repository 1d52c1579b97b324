"""Packed rows in files, and their reader."""

from twinkle_core.sharding.cache import ShardCache
from twinkle_core.sharding.reader import EncodedDataset, PackedDataset
from twinkle_core.sharding.writer import write_shards

__all__ = ["EncodedDataset", "PackedDataset", "ShardCache", "write_shards"]
