"""A model spread over several processes: sharded parameters, cut sequences, split layers, spread experts.

`layout` is pure; the other modules import torch.
"""
