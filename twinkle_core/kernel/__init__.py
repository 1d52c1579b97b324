"""Replacements for parts of a model's computation. The modules import torch; this package does not."""
