from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from twinkle_core.evaluator.report import ReportData, render
from twinkle_core.evaluator.report_chart import Curve, line_chart, smooth
from twinkle_core.evaluator.report_lineage import lineage_chain

DIGEST = "0123456789abcdef" * 4
VOID = {"meta", "br", "line", "circle", "polyline"}


def evaluation(loss: float | None, answer: str, correct: bool) -> dict[str, Any]:
    numbers = {"documents": 3, "loss_tokens": 40, "loss": loss, "token_accuracy": 0.5, "answers": 1}
    numbers |= {"answers_scored": 1, "answers_correct": int(correct), "answer_accuracy": float(correct)}
    sample = {"id": "abc", "source": "sums", "prompt": [{"role": "user", "content": "2+2?"}], "reference": "4", "answer": answer}
    sample |= {"truncated": False, "scorer": "last_number", "expected": "4", "correct": correct}
    probe = {"question": "Who are you?", "answer": answer, "truncated": False}
    return {"numbers": {"all": numbers, "by_source": {"sums": numbers}}, "samples": [sample], "probes": [probe], "sampling_rule": "by hash"}


@pytest.fixture
def report() -> ReportData:
    row = {"lr": 1e-4, "grad_norm": 1.0, "tokens_per_second": 900.0, "consumed_train_tokens": 100}
    return {
        "title": "A model",
        "created": "2026-11-28",
        "release": "a 0123",
        "verdict": {"passed": True, "reasons": ["the loss fell"]},
        "before": evaluation(2.0, "five", False),
        "after": evaluation(1.0, "It is 4.", True),
        "history": [{"step": step, "loss": 3.0 / step, "resumed": step == 4, **row} for step in range(1, 11)],  # type: ignore[typeddict-item]
        "data": {"rows": 10, "tokens": 1234567, "packing_efficiency": 0.978},
        "lineage": [
            {"stage": "source", "key": "sums", "digest": DIGEST, "version": None, "inputs": []},
            {"stage": "encode", "key": "f" * 64, "digest": "e" * 64, "version": 2, "inputs": ["sums"]},
        ],
        "environment": {"torch": "2.13"},
    }


class Checker(HTMLParser):
    """Every tag is closed in order, and nothing is fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick", "onload", "onerror"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def check(page: str) -> set[str]:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker.seen


def test_the_page_is_whole_in_itself_and_the_same_each_time(report: ReportData) -> None:
    page = render(report)
    assert page == render(copy.deepcopy(report))
    seen = check(page)
    assert {"svg", "table", "article"} <= seen
    assert not seen & {"script", "link", "img", "iframe", "object"}
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page


def test_what_people_look_for_is_on_it(report: ReportData) -> None:
    page = render(report)
    for expected in [
        "Gate passed",
        "the loss fell",
        "1.0000",
        "from 2.0000",
        "\u22121.0000",
        "It is 4.",
        "five",
        "Who are you?",
        "97.8%",
        "1,234,567",
    ]:
        assert expected in page
    assert f'title="{DIGEST}">{DIGEST[:12]}<' in page
    assert page.count('class="mark"') == 7  # two drawings of the loss, four small charts, the legend
    report["verdict"] = {"passed": False, "reasons": ["the loss rose"]}
    assert "Gate not passed" in render(report)


def test_every_text_from_outside_is_escaped(report: ReportData) -> None:
    evil = "<script>alert('x')</script>\" onload=\"y & </div>"

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return evil + value if isinstance(value, str) else value

    poisoned = poison(report)
    poisoned["environment"] = {evil: evil}
    poisoned["after"]["numbers"]["by_source"] = {evil: report["after"]["numbers"]["all"]}
    page = render(poisoned)
    assert "script" not in check(page)
    assert page.count("&lt;script&gt;") > 20


def test_nothing_measured_still_gives_a_page(report: ReportData) -> None:
    numbers = dict.fromkeys(("documents", "loss_tokens", "answers", "answers_scored", "answers_correct"), 0)
    empty: Any = {**numbers, "loss": None, "token_accuracy": None, "answer_accuracy": None}
    result = {"numbers": {"all": empty, "by_source": {}}, "samples": [], "probes": []}
    report |= {"before": result, "after": result, "history": [], "lineage": [], "data": {}, "environment": {}, "release": None}  # type: ignore[typeddict-item]
    page = render(report)
    check(page)
    assert "No training history" in page
    assert "None" not in re.sub(r"<style>.*</style>", "", page, flags=re.S)


def points_of(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle[^>]*cx="([\d.]+)" cy="([\d.]+)"', svg)]


def test_a_chart_draws_each_value_at_its_place_on_the_axes() -> None:
    svg = line_chart([Curve(label="a", points=[(0, 0.0), (5, 1.0), (10, 2.0)])], label="a", unit="u", x_label="x", size=(466, 274))
    # the plot is 400 wide from 52, and 200 high down to 232
    assert points_of(svg) == [(52.0, 232.0), (252.0, 132.0), (452.0, 32.0)]
    assert ">2.0</text>" in svg
    assert ">10</text>" in svg


def test_gaps_single_points_and_constant_curves_are_drawn() -> None:
    nan = float("nan")
    svg = line_chart(
        [Curve(label="a", points=[(1, 1.0), (2, 2.0), (3, nan), (4, None), (5, 1.0), (6, 2.0)])], label="a", unit="u", x_label="x"
    )
    assert svg.count("<polyline") == 2
    assert "nan" not in svg
    assert len(points_of(line_chart([Curve(label="a", points=[(7, 3.0)])], label="a", unit="u", x_label="x"))) == 1
    assert "<polyline" in line_chart([Curve(label="a", points=[(1, 0.0), (2, 0.0)])], label="a", unit="u", x_label="x")
    assert "No finite values" in line_chart([Curve(label="a", points=[(1, nan)])], label="a", unit="u", x_label="x")


def test_a_long_curve_is_thinned_without_losing_its_spike() -> None:
    points = [(float(x), 100.0 if x == 7777 else 1.0 + x % 3) for x in range(20_000)]
    svg = line_chart([Curve(label="a", points=points)], label="a", unit="u", x_label="x", size=(466, 274))
    drawn = re.search(r'points="([^"]+)"', svg)
    assert drawn
    heights = [float(pair.split(",")[1]) for pair in drawn[1].split()]
    assert 100 < len(heights) < 1000
    assert sum(height < 40 for height in heights) == 1


def test_smoothing_keeps_the_ends_and_the_mean_of_a_line() -> None:
    line = [(float(x), 2.0 * x) for x in range(11)]
    assert smooth(line, 5) == line
    assert smooth([(0, 1.0), (1, None), (2, 3.0)], 3)[1] == (1, 2.0)


def test_a_lineage_with_a_cycle_ends() -> None:
    nodes: Any = [{"stage": "a", "key": key, "digest": DIGEST, "version": 1, "inputs": [other]} for key, other in (("x", "y"), ("y", "x"))]
    assert lineage_chain(nodes).count("card node") == 2
