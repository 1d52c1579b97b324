"""Reported faults of the data order after a resume, with their right values (the case's name is in each docstring)."""

from collections import Counter
from itertools import islice

import pytest

from twinkle_core.dataloader import DataLoader, permutation
from twinkle_core.errors import ConfigError


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [4, 8])
@pytest.mark.parametrize("in_one_loop", [True, False])
def test_a_run_stopped_at_the_end_of_an_epoch_takes_all_remaining_steps(stop: int, in_one_loop: bool, num_workers: int) -> None:
    """RS01: 8 samples, batch 2, 3 epochs; stopped after step 4 or 8 of 12, 8 or 4 steps are left, and each sample is seen 3 times."""

    def make() -> DataLoader:
        return DataLoader(range(8), batch_size=2, num_epochs=3 if in_one_loop else None, num_workers=num_workers)

    def steps(loader: DataLoader) -> list[list[int]]:
        return [batch for _ in range(1 if in_one_loop else 3 - loader.epoch) for batch in loader]

    whole = steps(make())
    assert len(whole) == 12
    stopped, resumed = make(), make()
    loops = (batch for _ in range(1 if in_one_loop else 3) for batch in stopped)
    before = list(islice(loops, stop))
    assert stopped.get_state() == {"consumed_train_samples": 2 * stop}
    resumed.load_state_dict(stopped.state_dict())
    after = steps(resumed)
    assert len(after) == 12 - stop
    assert before + after == whole
    assert Counter(row for batch in before + after for row in batch) == dict.fromkeys(range(8), 3)


def test_a_run_stopped_at_its_end_has_no_steps_left_and_says_so() -> None:
    """RS01: stopped after step 12 of 12."""
    loader = DataLoader(range(8), batch_size=2, num_epochs=3)
    loader.resume_from_checkpoint(24)
    assert (loader.remaining, list(loader)) == (0, [])
    with pytest.raises(ConfigError, match="all 24 rows of this loader were handed out"):
        list(loader)
    loop = DataLoader(range(8), batch_size=2)
    loop.resume_from_checkpoint(24)
    assert list(range(loop.epoch, 3)) == []


def test_the_order_after_a_resume_is_that_of_the_epoch() -> None:
    """RS03: 10 samples, batch 1, 2 epochs, seed 7, stopped after step 13 of 20: the rest comes in epoch 1's order, not epoch 0's."""
    for num_epochs in (2, None):
        whole = [*permutation(10, 7, 0), *permutation(10, 7, 1)]
        loader = DataLoader(range(10), batch_size=1, seed=7, num_epochs=num_epochs)
        loader.resume_from_checkpoint(13)
        assert loader.epoch == 1
        assert [row for (row,) in loader] == whole[13:] != whole[3:10]


@pytest.mark.parametrize("killed_after", [4, 5])
def test_the_stored_number_is_that_of_the_next_batch(killed_after: int) -> None:
    """RS05: 6 batches, saved every 2, killed after the 4th: the 4th is not stepped twice. Killed after the 5th, only that one is again."""
    stepped, saved = [], {}
    for step, batch in enumerate(DataLoader(range(12), batch_size=2, num_epochs=1, shuffle=False), start=1):
        stepped.append(batch)
        if step % 2 == 0:
            saved = {"consumed_train_samples": 2 * step}
        if step == killed_after:
            break
    assert saved == {"consumed_train_samples": 8}
    resumed = DataLoader(range(12), batch_size=2, num_epochs=1, shuffle=False)
    resumed.load_state_dict(saved)
    assert list(resumed) == [[8, 9], [10, 11]]
    assert stepped[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
