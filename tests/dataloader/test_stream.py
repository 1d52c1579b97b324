from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataloader.resuming import Plain, Rows, Stream, assert_stopping_anywhere_changes_nothing, numbers, taken
from twinkle_core.dataloader import DataLoader
from twinkle_core.errors import ConfigError, DataError

shapes = st.tuples(st.integers(1, 10), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 2]), st.sampled_from([Stream, Plain]))


@settings(max_examples=20, deadline=None)
@given(shapes)
def test_one_loop_over_several_epochs_resumes(shape: tuple[int, int, int, int, type]) -> None:
    size, batch_size, epochs, workers, kind = shape
    whole = assert_stopping_anywhere_changes_nothing(
        lambda: DataLoader(kind(size), batch_size=batch_size, num_epochs=epochs, num_workers=workers)
    )
    source = kind(size)
    assert [row for _, batch in whole for row in batch] == [row for _ in range(epochs) for row in numbers(list(source))]
    assert all(len(batch) == batch_size for _, batch in whole[:-1])
    assert whole[-1][0] == size * epochs


@settings(max_examples=20, deadline=None)
@given(shapes, st.integers(1, 3))
def test_loops_over_epochs_resume(shape: tuple[int, int, int, int, type], min_batch_size: int) -> None:
    size, batch_size, epochs, workers, kind = shape
    if min_batch_size > min(batch_size, size):
        return
    kept = size - size % batch_size if size % batch_size < min_batch_size else size
    whole = assert_stopping_anywhere_changes_nothing(
        lambda: DataLoader(kind(size), batch_size=batch_size, num_workers=workers, min_batch_size=min_batch_size), epochs
    )
    source = kind(size)
    assert [row for _, batch in whole for row in batch] == [row for _ in range(epochs) for row in numbers(list(source))[:kept]]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 4))
def test_ranks_together_take_the_batch_of_one(size: int, batch_size: int, world_size: int) -> None:
    alone = list(taken(DataLoader(Stream(size), batch_size=batch_size, num_epochs=2)))
    parts = [
        list(taken(DataLoader(Stream(size), batch_size=batch_size, num_epochs=2, data_rank=rank, data_world_size=world_size)))
        for rank in range(world_size)
    ]
    for step, (consumed, batch) in enumerate(alone):
        assert [row for part in parts for row in part[step][1]] == batch
        assert {part[step][0] for part in parts} == {consumed}


def test_a_loop_that_is_left_goes_on_after_the_batch_in_hand() -> None:
    for kind in (Stream, Plain):
        loader = DataLoader(kind(10), batch_size=3, num_workers=2)
        first = [numbers(batch) for _, batch in zip(range(2), loader, strict=False)]
        assert first + [numbers(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert loader.epoch == 1


def test_a_cursor_that_no_batch_ends_at_is_refused() -> None:
    for num_epochs, consumed in ((2, 4), (2, 23), (None, 4)):
        with pytest.raises(ConfigError, match=rf"consumed_train_samples is {consumed}, but no batch of 3 rows ends there"):
            DataLoader(Stream(10), batch_size=3, num_epochs=num_epochs).resume_from_checkpoint(consumed)


def test_what_a_stream_cannot_do_is_refused() -> None:
    loader = DataLoader(Stream(10), batch_size=3)
    for ask in (lambda: len(loader), lambda: loader.remaining, lambda: loader.rows_at(0)):
        with pytest.raises(TypeError, match="stream"):
            ask()
    with pytest.raises(ConfigError, match="max_tokens needs a data set with numbered rows"):
        DataLoader(Stream(10), max_tokens=3)
    with pytest.raises(ConfigError, match="a generator, which can be read only once"):
        DataLoader((row for row in Plain(3)), batch_size=3)
    with pytest.raises(DataError, match="no rows"):
        list(DataLoader(Stream(0), batch_size=3))
    for num_epochs in (1, None):
        with pytest.raises(ConfigError, match="no step would be taken: 2 rows are fewer than min_batch_size 3"):
            list(DataLoader(Plain(2), batch_size=3, drop_last=True, num_epochs=num_epochs))
    loader.load_state_dict(DataLoader(Plain(4), batch_size=2).state_dict())
    with pytest.raises(ConfigError, match="has no state of the data set"):
        next(iter(loader))


def test_rows_with_numbers_are_no_stream() -> None:
    assert len(DataLoader(Rows(4), batch_size=3)) == 2
