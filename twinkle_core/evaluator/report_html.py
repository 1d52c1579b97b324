"""Pieces of the report: escaped text, tables, tiles and the charts of a training history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

from twinkle_core.evaluator.report_chart import Curve, line_chart, smooth


def text(value: object) -> str:
    """The only way that a value from outside enters the page."""
    return escape(str(value), quote=True)


def tag(name: str, body: str, classes: str = "") -> str:
    """`body` is HTML already; pass values through `text` first."""
    return f'<{name} class="{classes}">{body}</{name}>' if classes else f"<{name}>{body}</{name}>"


def facts_table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(tag("tr", tag("td", text(key)) + tag("td", text(value))) for key, value in rows)
    return tag("table", body, "facts") if body else '<p class="empty">Nothing recorded.</p>'


def page_tiles(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The three headline numbers, each with what it was before."""
    return tag(
        "div",
        _tile("Held-out loss", before["loss"], after["loss"], ".4f", "nats per token", lower_is_better=True)
        + _tile("Token accuracy", before["token_accuracy"], after["token_accuracy"], ".1%", f"{after['loss_tokens']:,} supervised tokens")
        + _tile("Answer accuracy", before["answer_accuracy"], after["answer_accuracy"], ".1%", _of(after)),
        "tiles",
    )


def _tile(name: str, old: float | None, new: float | None, form: str, note: str, *, lower_is_better: bool = False) -> str:
    change = "not measured"
    if old is not None and new is not None:
        better = (new < old) if lower_is_better else (new > old)
        colour = "" if new == old else ("good-text" if better else "bad-text")
        change = f"from {format(old, form)} · {tag('span', _change(old, new, form), colour)}"
    head = tag("div", text(name), "name") + tag("div", number(new, form), "big")
    return tag("div", head + tag("div", change, "sub") + tag("div", text(note), "sub"), "card tile")


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _change(old: float, new: float, form: str) -> str:
    if form.endswith("%"):
        return f"{(new - old) * 100:+.1f} points".replace("-", "−")
    return f"{new - old:+{form}}".replace("-", "−")


def _of(numbers: Mapping[str, Any]) -> str:
    if not numbers["answers_scored"]:
        return "no scored answers"
    return f"{numbers['answers_correct']} of {numbers['answers_scored']} scored answers"


def numbers_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Before and after, in all and by source."""
    old, new = before["numbers"], after["numbers"]
    groups = "".join(f'<th colspan="2" class="group">{name}</th>' for name in ("Loss", "Token accuracy", "Answer accuracy"))
    head = tag("tr", "<th></th><th></th>" + groups)
    head += tag("tr", "".join(tag("th", name) for name in ["Source", "Documents", *["before", "after"] * 3]))
    rows = [_numbers_row("All", old["all"], new["all"], "total")]
    rows += [_numbers_row(source, old["by_source"].get(source, {}), numbers, "") for source, numbers in new["by_source"].items()]
    return tag("table", tag("thead", head) + tag("tbody", "".join(rows)))


def _numbers_row(name: str, old: Mapping[str, Any], new: Mapping[str, Any], classes: str) -> str:
    cells = [text(name), f"{new['documents']:,}"]
    cells += [number(numbers.get("loss"), ".4f") for numbers in (old, new)]
    cells += [number(numbers.get("token_accuracy"), ".1%") for numbers in (old, new)]
    for numbers in (old, new):
        share = tag("span", f" {numbers['answers_correct']}/{numbers['answers_scored']}", "share") if numbers.get("answers_scored") else ""
        cells.append(number(numbers.get("answer_accuracy"), ".1%") + share)
    return tag("tr", "".join(tag("td", cell) for cell in cells), classes)


def loss_charts(history: Sequence[Mapping[str, Any]], before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Loss over the whole width, then learning rate, gradient norm and throughput, all by optimizer step."""
    if not history:
        return '<p class="empty">No training history.</p>'
    marks = [row["step"] for row in history if row.get("resumed")]
    points = [(row["step"], row["loss"]) for row in history]
    smooth_enough = len(points) < 8
    curves = [Curve(label="training loss, each step", points=points, style="line" if smooth_enough else "faint")]
    if not smooth_enough:
        curves.append(Curve(label="training loss, smoothed", points=smooth(points, max(3, len(points) // 10))))
    ends = (history[0]["step"], history[-1]["step"])
    levels: tuple[tuple[Literal["before", "after"], Mapping[str, Any]], ...] = (("before", before), ("after", after))
    for when, result in levels:
        if (level := result["numbers"]["all"]["loss"]) is not None:
            points = [(ends[0], level), (ends[1], level)]
            curves.append(Curve(label=f"held-out {when}, {level:.3f}", points=points, colour=when, style="dashed"))
    # One drawing for each width of screen: a scaled one would have letters too large or too small. CSS shows one of the two.
    label, unit = "Loss by optimizer step", "nats per token"
    wide = line_chart(curves, label=label, unit=unit, x_label="optimizer step", size=(980, 300), marks=marks)
    narrow = line_chart(curves, label=label, unit=unit, x_label="optimizer step", size=(460, 300), marks=marks)
    loss = tag("div", wide, "wide") + tag("div", narrow, "narrow")
    small = [
        _small_chart(history, "lr", "Learning rate", "per step", marks),
        _small_chart(history, "grad_norm", "Gradient norm", "L2, before clipping", marks),
        _small_chart(history, "tokens_per_second", "Throughput", "tokens per second", marks),
        _small_chart(history, "consumed_train_tokens", "Tokens trained on", "tokens", marks),
    ]
    main = tag("div", tag("h3", "Loss") + loss + _legend(curves, bool(marks)), "card")
    return main + tag("div", "".join(small), "charts")


def _small_chart(history: Sequence[Mapping[str, Any]], key: str, title: str, unit: str, marks: Sequence[float]) -> str:
    curve = Curve(label=title, points=[(row["step"], row.get(key)) for row in history])
    chart = line_chart([curve], label=f"{title} by optimizer step", unit=unit, x_label="optimizer step", marks=marks)
    return tag("div", tag("h3", text(title)) + chart, "card")


def _legend(curves: Sequence[Curve], has_marks: bool) -> str:
    items = [
        f'<li><svg viewBox="0 0 24 8"><line class="curve {curve.style} {curve.colour}" x1="1" x2="23" y1="4" y2="4"/></svg>'
        f"{text(curve.label)}</li>"
        for curve in curves
    ]
    if has_marks:
        items.append('<li><svg viewBox="0 0 24 8"><line class="mark" x1="12" x2="12" y1="-3" y2="11"/></svg>resumed here</li>')
    return tag("ul", "".join(items), "legend")
