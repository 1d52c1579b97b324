"""Seeding of whatever draws numbers in a process."""

from __future__ import annotations

import random
import sys

import numpy as np


def seed_everything(seed: int, full_determinism: bool = False) -> None:
    """Seeds `random`, numpy and, where it is loaded or determinism is asked for, torch, which then refuses kernels that vary."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if not full_determinism and "torch" not in sys.modules:
        return
    import torch

    torch.manual_seed(seed)
    if full_determinism:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
