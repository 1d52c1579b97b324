from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataloader.resuming import Rows, assert_stopping_anywhere_changes_nothing, numbers, taken
from twinkle_core.dataloader import DataLoader, permutation
from twinkle_core.errors import ConfigError, DataError

shapes = st.tuples(st.integers(1, 23), st.integers(1, 9), st.integers(1, 4))
small = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
workers = st.sampled_from([0, 0, 0, 2])


@settings(deadline=None)
@given(shapes, st.booleans(), workers)
def test_every_row_comes_once_an_epoch_and_only_the_last_batch_is_short(shape: tuple[int, int, int], shuffle: bool, workers: int) -> None:
    size, batch_size, epochs = shape
    loader = DataLoader(Rows(size), batch_size=batch_size, num_epochs=epochs, shuffle=shuffle, num_workers=workers)
    batches = [numbers(batch) for batch in loader]
    assert len(batches) == len(loader) == -(-size * epochs // batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    flat = [row for batch in batches for row in batch]
    for epoch in range(epochs):
        order = permutation(size, 42, epoch).tolist() if shuffle else list(range(size))
        assert flat[epoch * size : (epoch + 1) * size] == order
    assert len(flat) == size * epochs == loader.get_state()["consumed_train_samples"]
    assert loader.remaining == 0


@settings(max_examples=20, deadline=None)
@given(small, workers)
def test_a_run_of_several_epochs_resumes(shape: tuple[int, int, int], workers: int) -> None:
    size, batch_size, epochs = shape
    whole = assert_stopping_anywhere_changes_nothing(
        lambda: DataLoader(Rows(size), batch_size=batch_size, num_epochs=epochs, seed=7, num_workers=workers)
    )
    assert sum(len(batch) for _, batch in whole) == size * epochs


@settings(max_examples=20, deadline=None)
@given(small, workers, st.integers(1, 3))
def test_loops_over_epochs_resume(shape: tuple[int, int, int], workers: int, min_batch_size: int) -> None:
    size, batch_size, epochs = shape
    if min_batch_size > min(batch_size, size):
        return
    kept = size - size % batch_size if size % batch_size < min_batch_size else size
    whole = assert_stopping_anywhere_changes_nothing(
        lambda: DataLoader(Rows(size), batch_size=batch_size, num_workers=workers, min_batch_size=min_batch_size), epochs
    )
    flat = [row for _, batch in whole for row in batch]
    assert flat == [row for epoch in range(epochs) for row in permutation(size, 42, epoch)[:kept]]
    assert whole[-1][0] == kept * epochs


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 20), st.integers(1, 3), st.booleans(), workers)
def test_token_batches_resume(lengths: list[int], budget: int, epochs: int, in_one: bool, workers: int) -> None:
    def make() -> DataLoader:
        return DataLoader(Rows(0, lengths), max_tokens=budget, num_epochs=epochs if in_one else None, num_workers=workers)

    whole = assert_stopping_anywhere_changes_nothing(make, None if in_one else epochs)
    assert all(sum(lengths[row] for row in batch) <= budget for _, batch in whole)
    flat = [row for _, batch in whole for row in batch]
    for epoch in range(epochs):
        assert sorted(flat[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))
    if in_one:
        assert len(make()) == len(whole)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 3))
def test_windows_of_shards_resume(shard_rows: list[int], window: int, batch_size: int) -> None:
    size = sum(shard_rows)
    whole = assert_stopping_anywhere_changes_nothing(
        lambda: DataLoader(Rows(size, shard_rows=shard_rows), batch_size=batch_size, num_epochs=2, shuffle_shards=window)
    )
    flat = [row for _, batch in whole for row in batch]
    assert sorted(flat[:size]) == sorted(flat[size:]) == list(range(size))
    shard_of = np.repeat(np.arange(len(shard_rows)), shard_rows)
    first = flat[:size]
    for at in range(size):  # a shard that is begun is ended before more than `window` others are
        since = shard_of[first[first.index(next(row for row in first if shard_of[row] == shard_of[first[at]])) : at + 1]]
        assert len(set(since.tolist())) <= window


@settings(deadline=None)
@given(shapes, st.integers(1, 5), st.sampled_from([None, 4]))
def test_ranks_together_take_the_batch_of_one(shape: tuple[int, int, int], world_size: int, max_tokens: int | None) -> None:
    size, batch_size, epochs = shape
    how = {"max_tokens": max_tokens} if max_tokens else {"batch_size": batch_size}
    alone = list(taken(DataLoader(Rows(size), num_epochs=epochs, **how)))
    parts = [
        list(taken(DataLoader(Rows(size), num_epochs=epochs, data_rank=rank, data_world_size=world_size, **how)))
        for rank in range(world_size)
    ]
    for step, (consumed, batch) in enumerate(alone):
        assert [row for part in parts for row in part[step][1]] == batch
        assert {part[step][0] for part in parts} == {consumed}
    assert {len(part) for part in parts} == {len(alone)}


def test_a_rank_without_rows_in_the_last_batch_gets_an_empty_list() -> None:
    loader = DataLoader(Rows(5), batch_size=4, num_epochs=1, data_rank=1, data_world_size=2)
    assert [len(batch) for batch in loader] == [2, 0]
    assert len(list(DataLoader(Rows(5), batch_size=4, num_epochs=1, data_rank=1, data_world_size=2, min_batch_size=2))) == 1
    assert len(list(DataLoader(Rows(5), batch_size=4, num_epochs=1, drop_last=True))) == 1


def test_a_resumed_run_may_have_another_number_of_ranks_and_workers() -> None:
    whole = list(taken(DataLoader(Rows(17), batch_size=4, num_epochs=2)))
    parts = []
    for rank in range(3):
        loader = DataLoader(Rows(17), batch_size=4, num_epochs=2, num_workers=2, data_rank=rank, data_world_size=3)
        loader.resume_from_checkpoint(whole[4][0])
        parts.append(list(taken(loader)))
    assert [sum((part[step][1] for part in parts), []) for step in range(4)] == [batch for _, batch in whole[5:]]


def test_a_batch_reaches_over_the_end_of_an_epoch_only_in_a_run_of_several() -> None:
    loader = DataLoader(Rows(10), batch_size=4, num_epochs=2)
    expected = [*permutation(10, 42, 0)[8:], *permutation(10, 42, 1)[:2]]
    assert loader.rows_at(2).tolist() == expected
    assert [loader.rows_at(step).tolist() for step in (4, 0, 2)] == [loader.rows_at(step).tolist() for step in (4, 0, 2)]
    loop = DataLoader(Rows(10), batch_size=4)
    assert [len(batch) for epoch in range(2) for batch in loop] == [4, 4, 2, 4, 4, 2]
    with pytest.raises(IndexError):
        loader.rows_at(5)


def test_lengths_epochs_and_what_remains_are_right_after_a_resume() -> None:
    run = DataLoader(Rows(10), batch_size=4, num_epochs=3)
    run.resume_from_checkpoint(12)
    assert (len(run), run.remaining, run.epoch) == (8, 5, 1)
    loop = DataLoader(Rows(10), batch_size=4)
    loop.resume_from_checkpoint(14)
    assert (len(loop), loop.remaining, loop.epoch) == (3, 2, 1)
    loop.skip_consumed_samples(20)
    assert (loop.remaining, loop.epoch) == (3, 2)
    for _ in loop:
        pass
    assert (loop.remaining, loop.epoch, loop.get_state()) == (3, 3, {"consumed_train_samples": 30})


def test_the_cursor_counts_the_batch_in_hand_and_none_that_is_read_ahead() -> None:
    for workers in (0, 2):
        loader, seen = DataLoader(Rows(10), batch_size=4, num_epochs=1, num_workers=workers), []
        for batch in loader:
            seen.append((len(batch), loader.get_state()["consumed_train_samples"]))
            if len(seen) == 2:
                break
        assert seen == [(4, 4), (4, 8)]
        assert loader.remaining == 1
        assert [len(batch) for batch in loader] == [2]
        assert loader.get_state() == loader.state_dict() == {"consumed_train_samples": 10}


def test_a_break_at_the_last_batch_of_an_epoch_begins_the_next() -> None:
    loader = DataLoader(Rows(4), batch_size=2)
    batches = iter(loader)
    assert [row for _ in range(2) for row in numbers(next(batches))] == permutation(4, 42, 0).tolist()
    assert (loader.remaining, loader.epoch) == (0, 1)
    assert [row for batch in loader for row in numbers(batch)] == permutation(4, 42, 1).tolist()


def test_a_finished_run_resumes_to_no_steps_and_a_second_loop_is_refused() -> None:
    loader = DataLoader(Rows(8), batch_size=2, num_epochs=3)
    loader.resume_from_checkpoint(24)
    assert (list(loader), loader.remaining) == ([], 0)
    with pytest.raises(ConfigError, match="all 24 rows of this loader were handed out"):
        list(loader)
    loader.skip_consumed_samples(16)
    assert len(list(loader)) == 4


@pytest.mark.parametrize("consumed", [3, 25, -2])
def test_a_cursor_that_no_step_ends_at_is_refused(consumed: int) -> None:
    for loader in (DataLoader(Rows(8), batch_size=2, num_epochs=3), DataLoader(Rows(0, [2] * 8), max_tokens=4, num_epochs=3)):
        with pytest.raises(ConfigError, match=f"consumed_train_samples is {consumed}"):
            loader.resume_from_checkpoint(consumed)
    with pytest.raises(ConfigError, match=r"consumed_train_samples is 3, .* 8 rows an epoch in batches of 2"):
        DataLoader(Rows(8), batch_size=2).resume_from_checkpoint(3)


def test_an_old_loop_does_not_move_a_cursor_that_was_set_since() -> None:
    loader = DataLoader(Rows(8), batch_size=2, num_epochs=1)
    old = iter(loader)
    next(old)
    loader.resume_from_checkpoint(4)
    with pytest.raises(ConfigError, match="another one was begun, or the cursor was set"):
        next(old)
    assert loader.get_state() == {"consumed_train_samples": 4}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({}, "set either batch_size or max_tokens, got batch_size=None"),
        ({"batch_size": 1, "max_tokens": 5}, "set either batch_size or max_tokens, got batch_size=1 and max_tokens=5"),
        ({"batch_size": 2, "min_batch_size": 3}, "min_batch_size is 3"),
        ({"batch_size": 2, "min_batch_size": 2, "drop_last": True}, "drop_last means"),
        ({"max_tokens": 2, "drop_last": True}, "go with batch_size"),
        ({"batch_size": 4, "drop_last": True}, "no step would be taken: 3 rows are fewer than min_batch_size 4"),
        ({"batch_size": 1, "num_workers": -1}, "num_workers is -1"),
        ({"batch_size": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"batch_size": 1, "num_epochs": 0}, "num_epochs is 0"),
        ({"batch_size": 1, "seed": -1}, "seed is -1"),
        ({"batch_size": 1, "seed": 1 << 64}, r"seed is 18446744073709551616, but must be an integer from 0 to 2\*\*64 - 1"),
        ({"batch_size": 1, "seed": 1.5}, r"seed is 1\.5, but must be an integer from 0"),
        ({"batch_size": 1, "seed": None}, "seed is None, but must be an integer from 0"),
        ({"batch_size": 2.5}, r"batch_size is 2\.5, but must be an integer from 1"),
        ({"batch_size": 1, "num_epochs": 1.5}, r"num_epochs is 1\.5"),
        ({"batch_size": 1, "data_rank": 2, "data_world_size": 2}, "data_rank is 2, but data_world_size is 2"),
    ],
)
def test_settings_that_cannot_be_are_named(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DataLoader(Rows(3), **wrong)  # type: ignore[arg-type]


def test_the_largest_seeds_give_orders_of_their_own_and_numpy_integers_are_integers() -> None:
    def order(seed: int) -> tuple[int, ...]:
        return tuple(numbers(next(iter(DataLoader(Rows(9), batch_size=np.int64(9), seed=seed)))))  # type: ignore[call-overload]

    assert len({order(seed) for seed in (0, (1 << 63) + 1, (1 << 64) - 1)}) == 3
    assert order(np.uint64(7)) == order(7)  # type: ignore[arg-type]


def test_no_rows_too_long_rows_and_torch_settings_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        DataLoader(Rows(0, []), batch_size=1)
    with pytest.raises(DataError, match="row 1 has 9 tokens"):
        DataLoader(Rows(0, [1, 9]), max_tokens=8)
    with pytest.raises(TypeError, match="pin_memory"):
        DataLoader(Rows(1), batch_size=1, pin_memory=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="int is neither"):
        DataLoader(3, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has the keys \['consumed_train_samples'\], not \['consumed', 'epoch'\]"):
        DataLoader(Rows(1), batch_size=1).load_state_dict({"consumed": 1, "epoch": 0})


def test_a_function_may_make_the_data_set() -> None:
    assert len(DataLoader(lambda: Rows(8), batch_size=2)) == 4
    assert len(DataLoader([1, 2, 3], batch_size=2, num_epochs=1)) == 2


def test_a_cursor_is_a_whole_number() -> None:
    loader = DataLoader(Rows(8), batch_size=2)
    loader.resume_from_checkpoint(np.int64(4))  # type: ignore[arg-type]
    assert loader.get_state() == {"consumed_train_samples": 4} and loader.remaining == 2
    for wrong in (4.0, "4", None):
        with pytest.raises(ConfigError, match=r"consumed_train_samples is a whole number, got"):
            loader.resume_from_checkpoint(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"consumed_train_samples is a whole number, got"):
            loader.load_state_dict({"consumed_train_samples": wrong})
