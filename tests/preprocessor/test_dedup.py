from __future__ import annotations

import io
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.preprocessor import dedup
from twinkle_core.preprocessor.dedup import (
    NUM_HASHES,
    SignatureWriter,
    _candidates,
    _shared_bands,
    near_repeated,
    open_signatures,
    shingles,
    values_per_band,
)
from twinkle_core.preprocessor.split import repeated
from twinkle_core.types import Trajectory


def digests(values: list[int]) -> np.ndarray:
    return np.array([[value % 2, value] for value in values], dtype=np.uint64).reshape(-1, 2)


@given(st.lists(st.integers(0, 6), max_size=40))
def test_all_but_the_first_of_equal_rows_are_repeated(values: list[int]) -> None:
    assert repeated(digests(values)).tolist() == [value in values[:index] for index, value in enumerate(values)]


def text(words: list[str]) -> Trajectory:
    return {"messages": [], "text": " ".join(words)}


def signatures(trajectories: list[Trajectory]) -> np.ndarray:
    file = io.BytesIO()
    writer = SignatureWriter(file)
    for trajectory in trajectories:
        writer.add(trajectory)
    writer.flush()
    return np.frombuffer(file.getvalue(), dtype="<u4").reshape(-1, NUM_HASHES)


def near(trajectories: list[Trajectory], similarity: float) -> list[bool]:
    return near_repeated(signatures(trajectories), similarity, np.zeros(len(trajectories), dtype=bool)).tolist()


def test_near_copies_go_and_others_stay_whatever_lies_between() -> None:
    chance = random.Random(0)
    bases = [[f"w{chance.randrange(10**6)}" for _ in range(400)] for _ in range(8)]
    copies = [[*base[:200], "changed", *base[201:]] for base in bases]  # 5 of 396 shingles differ: similarity 0.975
    halves = [[*base[:200], *(f"other{i}" for i in range(200))] for base in bases]  # about 0.33
    assert near([text(words) for words in [*bases, *halves, *copies]], 0.9) == [False] * 16 + [True] * 8
    assert near([text(words) for words in [*copies, *bases]], 0.9) == [False] * 8 + [True] * 8


def test_order_of_words_and_short_texts_count() -> None:
    rows = [text(["a", "b"]), text(["b", "a"]), text(["a", "b"]), text([]), text([])]
    assert near(rows, 0.9) == [False, False, True, False, True]


def test_an_answer_judged_good_is_not_a_copy_of_it_judged_bad() -> None:
    judged: list[Trajectory] = [
        {"messages": [{"role": "assistant", "content": "a b c d e f g"}], "desirable": good} for good in (True, False)
    ]
    assert not set(shingles(judged[0])) & set(shingles(judged[1]))
    assert near([*judged, *judged], 0.9) == [False, False, True, True]


def whole_bands(row: np.ndarray, band: int) -> np.ndarray:
    return row[: NUM_HASHES // band * band].reshape(-1, band)


@pytest.mark.parametrize("crowd", [1, 3, 10**6])
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=25), st.sampled_from([0.5, 0.75, 1.0]))
def test_rows_out_are_those_that_equal_an_earlier_kept_row_enough_and_share_a_band(
    crowd: int, rows: list[list[int]], similarity: float
) -> None:
    """Two rows that are each among many with the same band need share none."""
    made = np.repeat(np.array(rows, dtype=np.uint32).reshape(-1, 4), NUM_HASHES // 4, axis=1)
    band = values_per_band(similarity)
    bands = [[tuple(own) for own in enumerate(map(tuple, whole_bands(row, band).tolist()))] for row in made]
    sizes = Counter(own for row in bands for own in row)
    crowded = [any(sizes[own] > crowd for own in row) for row in bands]
    kept: list[int] = []
    expected = []
    for index, row in enumerate(made):
        close = [
            other for other in kept
            if (made[other] == row).mean() >= similarity and (set(bands[index]) & set(bands[other]) or crowded[index] and crowded[other])
        ]  # fmt: skip
        expected.append(bool(close))
        if not close:
            kept.append(index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "CROWD", crowd)
        assert near_repeated(made, similarity, np.zeros(len(made), dtype=bool)).tolist() == expected


def rows_of_one_mould(num_rows: int, changed: float) -> np.ndarray:
    """Signatures that differ from a common one in this share of their values, each in values of its own."""
    chance = np.random.default_rng(0)
    made = np.tile(chance.integers(0, 1 << 32, NUM_HASHES, dtype=np.uint32), (num_rows, 1))
    own = chance.random(made.shape) < changed
    made[own] = chance.integers(0, 1 << 32, int(own.sum()), dtype=np.uint32)
    return made


@pytest.mark.parametrize("changed", [0.05, 0.08, 0.11, 0.134])
def test_rows_of_one_mould_are_told_apart_as_if_each_were_compared_with_each(changed: float) -> None:
    made = rows_of_one_mould(400, changed)
    made[300:] = made[100:200]
    made[300:, :6] += 1  # 122 of 128 values are equal
    kept: list[int] = []
    for row in range(len(made)):
        if not kept or (made[kept] == made[row]).mean(axis=1).max() < 0.9:
            kept.append(row)
    mask = near_repeated(made, 0.9, np.zeros(len(made), dtype=bool))
    assert np.flatnonzero(~mask).tolist() == kept
    assert _shared_bands(made, values_per_band(0.9), np.zeros(len(made), dtype=bool))[1].mean() > 0.9, "they are a crowd"


@pytest.mark.parametrize("changed", [0.05, 0.08, 0.11, 0.134])
def test_the_comparisons_of_rows_of_one_mould_grow_with_their_number_alone(changed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "LATEST", 16)
    most = NUM_HASHES // values_per_band(0.9) + 13  # places of a row
    for num_rows in (500, 2000):
        compared = Compared.of(rows_of_one_mould(num_rows, changed))
        near_repeated(compared, 0.9, np.zeros(num_rows, dtype=bool))
        assert compared.most_at_once[0] <= 16 * most


class Compared(np.ndarray):
    """Signatures that count how many rows are looked up by a list."""

    most_at_once: list[int]

    @classmethod
    def of(cls, made: np.ndarray) -> Compared:
        compared = made.view(cls)
        compared.most_at_once = [0]
        return compared

    def __getitem__(self, wanted: Any) -> Any:
        if isinstance(wanted, list):
            self.most_at_once[0] = max(self.most_at_once[0], len(wanted))
        return np.asarray(self)[wanted]


def test_rows_that_are_out_already_are_compared_with_nothing() -> None:
    made = np.zeros((3, NUM_HASHES), dtype=np.uint32)
    assert near_repeated(made, 0.9, np.array([True, False, False])).tolist() == [False, False, True]
    shared, crowded = _shared_bands(made, 8, np.array([True, False, True]))
    assert not shared.any() and not crowded.any() and not list(_candidates(made, 8, shared, crowded, 0.9))


@pytest.mark.parametrize(("similarity", "band"), [(0.01, 1), (0.5, 3), (0.8, 6), (0.9, 10), (0.99, 32), (1.0, 128)])
def test_bands_are_as_long_as_the_chance_to_miss_a_pair_allows(similarity: float, band: int) -> None:
    assert values_per_band(similarity) == band
    assert band == 1 or (1 - similarity**band) ** (NUM_HASHES // band) <= 0.01


def test_signatures_are_those_of_this_version_of_the_algorithm(tmp_path: Path) -> None:
    made = signatures([text([f"w{i}" for i in range(50)])] * 3)
    (tmp_path / "s").write_bytes(made.tobytes())
    assert (open_signatures(tmp_path / "s") == made).all()
    assert made[0, :4].tolist() == made[2, :4].tolist() == GOLDEN
    (tmp_path / "empty").touch()
    assert open_signatures(tmp_path / "empty").shape == (0, NUM_HASHES)


GOLDEN = [1859509716, 3224298581, 3268098733, 1244171245]
