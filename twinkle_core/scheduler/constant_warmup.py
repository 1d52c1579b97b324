"""1 after a linear warm-up."""


def constant_warmup(step: int, num_training_steps: int, num_warmup_steps: int) -> float:
    """Example: of 10 steps with 2 of warm-up, steps 0, 1, 2, 9 have 0.5, 1, 1, 1; after the last it is 0."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    return 1.0 if step < num_training_steps else 0.0
