"""Losses: each gives a sum and a count, never a mean. The modules import torch; this package does not."""
