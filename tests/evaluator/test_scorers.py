from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from twinkle_core.errors import DataError
from twinkle_core.evaluator.scorers import contains, exact, find_number, last_number, score

CASES = Path(__file__).parents[3] / "shared" / "cases"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the change is -3", "-3"),
        ("\u22123", "-3"),
        ("+5", "5"),
        ("-.5", "-0.5"),
        ("x=-3", "-3"),
        ("10-3", "3"),
        ("between 3-5", "5"),
        ("1,234.", "1234"),
        ("$1,000, in total", "1000"),
        ("-$29.00.", "-29"),
        ("72, altogether", "72"),
        ("pages 1,2,3", "3"),
        ("3.14159", "3.14159"),
        ("2e3", "2000"),
        ("7 apples in box v2", "7"),
        ("#### 9\n\nQuestion: 4 pens\n#### 4", "9"),
        ("\\boxed{-9}. Next question: 12", "-9"),
        ("#### Step 1\nso it is 8", "8"),
        ("none here, sorry", None),
        ("", None),
    ],
)
def test_the_number_of_a_text(text: str, number: str | None) -> None:
    assert find_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("case", ["EV01", "EV03", "EV04", "EV08"])
def test_reported_faults_are_scored_right(case: str) -> None:
    file = CASES / case / "answers.jsonl"
    if not file.is_file():
        pytest.skip("the shared cases are not here")
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    decided = [row for row in rows if isinstance(row["correct"], bool)]
    assert decided
    for row in decided:
        assert last_number(row["prediction"], row["gold"]) is row["correct"], row


def test_contains_wants_whole_words_and_ignores_case() -> None:
    assert contains("I am ADA, your assistant", "Ada")
    assert contains("I am Ada\n  Lovelace.", "ada lovelace")
    assert not contains("An adamant answer", "Ada")
    assert contains("C++ is fine", "c++")
    assert not contains("", "Ada")


def test_exact_ignores_only_white_space() -> None:
    assert exact(" Paris \n", "Paris")
    assert not exact("paris", "Paris")
    assert not exact("Paris.", "Paris")


def test_minus_three_is_not_three() -> None:
    assert last_number("-3", "-3.0")
    assert not last_number("3", "-3")
    assert not last_number("-3", "3")
    assert not last_number("2900", "29")


@pytest.mark.parametrize(
    ("scorer", "answer"), [("fuzzy", "x"), ("__class__", "x"), ("contains", None), ("contains", "  "), ("last_number", "none")]
)
def test_what_cannot_be_scored_is_refused(scorer: str, answer: str | None) -> None:
    with pytest.raises(DataError, match=scorer):
        score(scorer, "text 1", answer)
