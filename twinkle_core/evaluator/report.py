"""The evaluation report: one HTML page for people, whole in itself: no script, no network, nothing that is not escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NotRequired, TypedDict

from twinkle_core.evaluator.report_html import facts_table, loss_charts, numbers_table, page_tiles, tag, text
from twinkle_core.evaluator.report_lineage import LineageNode, lineage_chain

SHOWN_SAMPLES = 10
"""Further samples are folded away."""


class VerdictData(TypedDict):
    """The gate's decision, see `gate.Verdict`."""

    passed: bool
    reasons: list[str]


class HistoryRow(TypedDict):
    """One optimizer step. A value that is not known is None."""

    step: int
    """1-based optimizer step."""
    loss: float | None
    """Mean loss per supervised token of the global batch, in nats."""
    lr: float | None
    grad_norm: float | None
    """Global L2 norm before clipping."""
    tokens_per_second: float | None
    consumed_train_samples: NotRequired[int]
    """Packed rows handed to steps up to and including this one."""
    consumed_train_tokens: NotRequired[int]
    epoch: NotRequired[float]
    resumed: NotRequired[bool]
    """True for the first step after a resume: marked in the charts."""


class DataNumbers(TypedDict, total=False):
    """What was trained on."""

    rows: int
    """Packed rows."""
    documents: int
    tokens: int
    """Tokens in one pass, padding not counted."""
    loss_tokens: int
    """Supervised tokens in one pass."""
    packing_efficiency: float
    """tokens / (rows x row length), 0 to 1."""
    longest: int
    """Tokens of the longest document."""


class ReportData(TypedDict):
    """All that the page shows: plain JSON values."""

    title: str
    created: str
    """For people: '2026-11-28 00:15 UTC'."""
    release: str | None
    """'name version', or None before it is published."""
    verdict: VerdictData
    before: dict[str, Any]
    """`evaluate_model` of the base model: `numbers`, `samples`, `probes`, `sampling_rule`."""
    after: dict[str, Any]
    """The same of the trained model, on the same rows. Samples are paired by `id`, probes by question."""
    history: list[HistoryRow]
    """By step."""
    data: DataNumbers
    lineage: list[LineageNode]
    """From sources to release, in any order."""
    environment: dict[str, str]
    """Versions, hardware, seed, base model. No local paths, no user names."""


def render(report: ReportData) -> str:
    """The whole page as HTML text. The same dict gives the same text."""
    style = files("twinkle_core.evaluator").joinpath("report_style.css").read_text(encoding="utf-8")
    sections = [
        _head(report),
        _section("Held-out rows", _HELD_OUT_NOTE, tag("div", numbers_table(report["before"], report["after"]), "card scroll")),
        _section("Training", "", loss_charts(report["history"], report["before"], report["after"])),
        _section("Training data", "", tag("div", _data_table(report["data"], report["history"]), "card")),
        _section("Answers, before and after", report["after"].get("sampling_rule", ""), _samples(report["before"], report["after"])),
    ]
    if report["after"]["probes"]:
        probes = _probes(report["before"], report["after"])
        sections.append(_section("Probes", "Questions asked of both models; nobody scores them.", probes))
    sections.append(_section("Lineage", _LINEAGE_NOTE, lineage_chain(report["lineage"])))
    sections.append(_section("Environment", "", tag("div", facts_table(report["environment"].items()), "card")))
    body = "".join(sections) + tag("footer", f"{text(report['title'])} · {text(report['created'])}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(report['title'])}</title><style>\n{style}</style></head><body><main>{body}</main></body></html>\n"
    )


_HELD_OUT_NOTE = (
    "Rows that training never saw. Loss and token accuracy are means over supervised tokens; answer accuracy is over scored answers."
)
_LINEAGE_NOTE = "From the release back to its sources. Each digest is the sha256 of content; the full one shows when you point at it."


def _head(report: ReportData) -> str:
    verdict = report["verdict"]
    mark = "✓ Gate passed" if verdict["passed"] else "✗ Gate not passed"
    reasons = tag("ul", "".join(tag("li", text(reason)) for reason in verdict["reasons"]))
    released = f"{text(report['release'])} · " if report["release"] else ""
    return (
        '<p class="eyebrow">Fine-tune report</p>'
        + tag("h1", text(report["title"]))
        + tag("p", released + text(report["created"]), "lead")
        + tag("div", tag("strong", mark) + reasons, "verdict good" if verdict["passed"] else "verdict bad")
        + page_tiles(report["before"]["numbers"]["all"], report["after"]["numbers"]["all"])
    )


def _section(title: str, note: str, body: str) -> str:
    return tag("section", tag("h2", text(title)) + (tag("p", text(note), "note") if note else "") + body)


def _data_table(data: DataNumbers, history: Sequence[HistoryRow]) -> str:
    labels = {
        "rows": "Packed rows",
        "documents": "Documents",
        "tokens": "Tokens, one pass",
        "loss_tokens": "Supervised tokens, one pass",
        "packing_efficiency": "Packing efficiency",
        "longest": "Longest document, tokens",
    }
    values: Mapping[str, Any] = data
    forms = {"packing_efficiency": ".1%"}
    rows = [(label, format(values[key], forms.get(key, ","))) for key, label in labels.items() if key in values]
    if history:
        last = history[-1]
        rows.append(("Optimizer steps", f"{last['step']:,}"))
        if "consumed_train_samples" in last:
            rows.append(("Rows trained on, all passes", f"{last['consumed_train_samples']:,}"))
        if "consumed_train_tokens" in last:
            rows.append(("Tokens trained on, all passes", f"{last['consumed_train_tokens']:,}"))
        if resumes := sum(bool(row.get("resumed")) for row in history):
            rows.append(("Resumed", f"{resumes} times" if resumes > 1 else "once"))
    return facts_table(rows)


def _samples(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    earlier = {sample["id"]: sample for sample in before["samples"]}
    cards = [_sample(earlier.get(sample["id"]), sample) for sample in after["samples"]]
    if not cards:
        return '<p class="empty">No answers were generated.</p>'
    rest = cards[SHOWN_SAMPLES:]
    folded = tag("details", tag("summary", f"{len(rest)} more") + "".join(rest)) if rest else ""
    return "".join(cards[:SHOWN_SAMPLES]) + folded


def _sample(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    header = tag("header", tag("span", text(after["source"]), "badge") + tag("span", text(after["id"]), "mono"))
    turns = "".join(_turn(message["role"], message["content"]) for message in after["prompt"])
    expected = f"Reference: {text(after['reference'])}"
    if after["scorer"]:
        expected += f" · scored by {text(after['scorer'])} against {tag('span', text(after['expected']), 'mono')}"
    return tag("article", header + turns + _sides(before, after) + tag("p", expected, "expected says"), "card sample")


def _probes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    earlier = {probe["question"]: probe for probe in before["probes"]}
    cards = [_turn("user", probe["question"]) + _sides(earlier.get(probe["question"]), probe) for probe in after["probes"]]
    return "".join(tag("article", card, "card sample") for card in cards)


def _turn(role: str, content: str) -> str:
    return tag("p", tag("span", text(role), "role") + tag("span", text(content), "says"), "turn")


def _sides(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    return tag("div", _side("Before", before) + _side("After", after), "sides")


def _side(label: str, sample: Mapping[str, Any] | None) -> str:
    badges = ""
    answer = '<span class="empty">not asked</span>'
    if sample is not None:
        if sample.get("correct") is not None:
            badges += tag("span", "✓ right" if sample["correct"] else "✗ wrong", f"badge {'good' if sample['correct'] else 'bad'}")
        if sample["truncated"]:
            badges += tag("span", "cut at the limit", "badge")
        answer = tag("div", text(sample["answer"]), "says") if sample["answer"] else '<span class="empty">empty answer</span>'
    return tag("div", tag("div", label + badges, "label") + answer, f"side {label.lower()}")
