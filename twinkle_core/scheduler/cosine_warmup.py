"""Half a cosine from 1 to 0 after a linear warm-up (https://arxiv.org/abs/1608.03983, without restarts)."""

import math


def cosine_warmup(step: int, num_training_steps: int, num_warmup_steps: int) -> float:
    """Example: of 10 steps with 2 of warm-up, steps 0, 1, 2, 6 have 0.5, 1, 1, 0.5; after the last it is 0."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if step >= num_training_steps:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (step - num_warmup_steps) / (num_training_steps - num_warmup_steps)))
