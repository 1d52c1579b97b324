from __future__ import annotations

from typing import Any

import pytest

from twinkle_core.config import PublishConfig
from twinkle_core.evaluator.gate import gate


def result(loss: float | None, *, correct: int = 0, scored: int = 0, documents: int | None = None) -> dict[str, Any]:
    count = (0 if loss is None else 5) if documents is None else documents
    row = {"documents": count, "loss_tokens": 10 * count, "loss": loss}
    row |= {"answers_scored": scored, "answers_correct": correct, "answer_accuracy": correct / scored if scored else None}
    return {"numbers": {"all": row, "by_source": {}}}


@pytest.mark.parametrize(
    ("before", "after", "limit", "passed"),
    [(1.0, 0.9, 0.0, True), (1.0, 1.0, 0.0, True), (1.0, 1.25, 0.25, True), (1.0, 1.26, 0.25, False), (1.0, 0.9, -0.2, False)],
)
def test_the_loss_may_rise_by_the_limit_and_no_more(before: float, after: float, limit: float, passed: bool) -> None:
    verdict = gate(result(before), result(after), PublishConfig(max_loss_increase=limit))
    assert verdict.passed is passed
    assert f"{after:.4f}" in verdict.reasons[0]


@pytest.mark.parametrize(("before", "after"), [(1.0, float("nan")), (float("nan"), 1.0), (1.0, float("inf")), (float("inf"), float("inf"))])
def test_a_loss_that_is_no_number_never_passes(before: float, after: float) -> None:
    verdict = gate(result(before), result(after), PublishConfig(max_loss_increase=1e9))
    assert not verdict.passed
    assert "finite" in verdict.reasons[0]


def test_accuracy_must_reach_the_minimum() -> None:
    publish = PublishConfig(min_accuracy=0.5)
    assert gate(result(1.0), result(0.5, correct=2, scored=4), publish).passed
    failed = gate(result(1.0), result(0.5, correct=1, scored=4), publish)
    assert not failed.passed
    assert failed.reasons == ("answer accuracy is 25.0% (1 of 4); at least 50.0% is asked for",)
    unscored = gate(result(1.0), result(0.5), publish)
    assert not unscored.passed
    assert "no held-out answer was scored" in unscored.reasons[0]


def test_without_held_out_rows_nothing_was_measured_and_nothing_is_released() -> None:
    verdict = gate(result(None), result(None), PublishConfig())
    assert not verdict.passed
    assert "no held-out rows" in verdict.reasons[0]


def test_different_rows_are_not_compared() -> None:
    for before, after in [(result(1.0), result(None)), (result(None), result(1.0)), (result(1.0, documents=5), result(0.5, documents=4))]:
        verdict = gate(before, after, PublishConfig())
        assert not verdict.passed
        assert "different rows" in verdict.reasons[0]
