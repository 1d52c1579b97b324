from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.dataloader import DataLoader, permutation
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.types import EncodedSample


class Rows:
    """Row i holds the token i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> EncodedSample:
        return EncodedSample(input_ids=np.array([index]), labels=np.array([-100]))


def run(loader: DataLoader) -> list[list[int]]:
    return [[int(row.input_ids[0]) for row in batch] for batch in loader]


def test_the_order_is_frozen() -> None:
    assert permutation(8, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    assert permutation(8, 42, 1).tolist() == [4, 5, 3, 0, 2, 7, 1, 6]


shapes = st.tuples(st.integers(1, 23), st.integers(1, 9), st.integers(1, 4))


@given(shapes, st.booleans())
def test_every_row_comes_once_an_epoch_and_only_the_last_window_is_short(shape: tuple[int, int, int], shuffle: bool) -> None:
    size, batch_size, epochs = shape
    loader = DataLoader(Rows(size), batch_size=batch_size, num_epochs=epochs, shuffle=shuffle)
    batches = run(loader)
    assert len(batches) == len(loader) == -(-size * epochs // batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    flat = [row for batch in batches for row in batch]
    for epoch in range(epochs):
        assert sorted(flat[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert len(flat) == size * epochs == loader.get_state()["consumed_train_samples"]


@given(shapes)
def test_resuming_after_any_step_goes_on_with_the_uninterrupted_order(shape: tuple[int, int, int]) -> None:
    size, batch_size, epochs = shape
    whole = run(DataLoader(Rows(size), batch_size=batch_size, num_epochs=epochs, seed=7))
    for step in range(len(whole)):
        loader = DataLoader(Rows(size), batch_size=batch_size, num_epochs=epochs, seed=7)
        loader.resume_from_checkpoint(loader.consumed_after(step))
        assert len(loader) == len(whole)
        assert run(loader) == whole[step + 1 :]


def test_a_batch_reaches_over_the_end_of_an_epoch() -> None:
    loader = DataLoader(Rows(10), batch_size=4, num_epochs=2)
    expected = [*permutation(10, 42, 0)[8:], *permutation(10, 42, 1)[:2]]
    assert loader.rows_at(2).tolist() == expected
    assert [loader.rows_at(step).tolist() for step in (4, 0, 2)] == [loader.rows_at(step).tolist() for step in (4, 0, 2)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [permutation(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_cursor_counts_the_batch_in_hand() -> None:
    loader, seen = DataLoader(Rows(10), batch_size=4), []
    for batch in loader:
        seen.append((len(batch), loader.get_state()["consumed_train_samples"]))
        if len(seen) == 2:
            break
    assert seen == [(4, 4), (4, 8)]
    assert [len(batch) for batch in loader] == [2]
    assert loader.get_state() == {"consumed_train_samples": 10}


def test_a_finished_run_resumes_to_no_steps_and_a_second_loop_is_refused() -> None:
    loader = DataLoader(Rows(8), batch_size=2, num_epochs=3)
    loader.resume_from_checkpoint(24)
    assert run(loader) == []
    with pytest.raises(ConfigError, match="all 12 steps of this loader were handed out"):
        run(loader)
    loader.skip_consumed_samples(16)
    assert len(run(loader)) == 4


@pytest.mark.parametrize("consumed", [3, 25, -2])
def test_a_cursor_that_no_step_ends_at_is_refused(consumed: int) -> None:
    with pytest.raises(ConfigError, match=f"consumed_train_samples is {consumed}"):
        DataLoader(Rows(8), batch_size=2, num_epochs=3).resume_from_checkpoint(consumed)


def test_no_rows_and_no_batch_size_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        DataLoader(Rows(0), batch_size=1)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        DataLoader(Rows(1), batch_size=0)
