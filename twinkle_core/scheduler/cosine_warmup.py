"""Half a cosine from 1 to 0 after a linear warm-up (https://arxiv.org/abs/1608.03983, without restarts)."""

import math


def cosine_warmup(step: int, num_training_steps: int, num_warmup_steps: int, num_cycles: float = 0.5) -> float:
    """Example: of 10 steps with 2 of warm-up, steps 0, 1, 2, 6 have 0.5, 1, 1, 0.5; after the last it is 0.

    `num_cycles` counts whole waves between warm-up and end: 0.5 falls once, 1.5 falls, rises and falls.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if step >= num_training_steps:
        return 0.0
    turn = math.pi * 2 * num_cycles
    return 0.5 * (1.0 + math.cos(turn * (step - num_warmup_steps) / (num_training_steps - num_warmup_steps)))
