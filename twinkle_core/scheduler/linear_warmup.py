"""A straight line from 1 to 0 after a linear warm-up."""


def linear_warmup(step: int, num_training_steps: int, num_warmup_steps: int) -> float:
    """Example: of 10 steps with 2 of warm-up, steps 0, 1, 2, 6 have 0.5, 1, 1, 0.5; after the last it is 0."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if step >= num_training_steps:
        return 0.0
    return (num_training_steps - step) / (num_training_steps - num_warmup_steps)
