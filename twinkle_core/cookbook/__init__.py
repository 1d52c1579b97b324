"""Short programs to start from: `python -m twinkle_core.cookbook.packing_dataset`. Each has `train()`, and tests run two steps of it."""
