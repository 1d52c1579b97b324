"""Line charts as inline SVG: no script, no font, no network. Colours come from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 32, 42
"""Margins around the plot, in the units of the view box."""
MAX_POINTS = 400
"""Longer curves are thinned to the lowest and highest point of each bucket, so that no spike is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line. A y of None or not finite is a gap."""

    label: str
    points: Sequence[tuple[float, float | None]]
    colour: Literal["accent", "before", "after", "muted"] = "accent"
    style: Literal["line", "faint", "dashed"] = "line"


def line_chart(
    curves: Sequence[Curve], *, label: str, unit: str, x_label: str, size: tuple[int, int] = (460, 230), marks: Sequence[float] = ()
) -> str:
    """An `<svg>` with axes, ticks, grid and labels. `label` is read aloud; `marks` are x positions with a vertical line (resumes).
    `size` is the view box: text keeps its size only when it is near the width in pixels that the chart gets on the page.
    """
    width, height = size
    finite = [(x, y) for curve in curves for x, y in curve.points if y is not None and math.isfinite(y)]
    if not finite:
        return f'<p class="empty">No finite values of {escape(label)}.</p>'
    x_ticks = _ticks(min(x for x, _ in finite), max(x for x, _ in finite), max(4, width // 110), whole=True)
    y_ticks = _ticks(min(y for _, y in finite), max(y for _, y in finite), 5)
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    frame = _Frame(x_low=x_low, x_high=x_high, y_low=y_ticks[0], y_high=y_ticks[-1], width=width, height=height)
    bottom = height - BOTTOM
    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>']
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick_text(tick, y_ticks)}</text>')
    for tick in (tick for tick in x_ticks if x_low <= tick <= x_high):
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_tick_text(tick, x_ticks)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="tick" x="{(LEFT + width - RIGHT) / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text class="tick" x="0" y="13">{escape(unit)}</text>')
    for mark in marks:
        x = frame.x(mark)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"><title>resumed at {mark:g}</title></line>')
    parts += [_curve(curve, frame) for curve in curves]
    return "".join(parts) + "</svg>"


def smooth(points: Sequence[tuple[float, float | None]], window: int) -> list[tuple[float, float | None]]:
    """Mean of the finite values in a centred window that shrinks at both ends, so that the line starts and ends where the data does."""
    result: list[tuple[float, float | None]] = []
    for index, (x, _) in enumerate(points):
        reach = min(window // 2, index, len(points) - 1 - index)
        near = [y for _, y in points[index - reach : index + reach + 1] if y is not None and math.isfinite(y)]
        result.append((x, sum(near) / len(near) if near else None))
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (self.height - BOTTOM - TOP)


def _curve(curve: Curve, frame: _Frame) -> str:
    segments: list[list[tuple[float, float]]] = [[]]
    for x, y in curve.points:
        if y is not None and math.isfinite(y):
            segments[-1].append((x, y))
        elif segments[-1]:
            segments.append([])
    parts = []
    classes = f"curve {curve.style} {curve.colour}"
    for segment in (_thin(segment) for segment in segments if segment):
        places = [(frame.x(x), frame.y(y)) for x, y in segment]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{classes}" points="{path}"><title>{escape(curve.label)}</title></polyline>')
        if len(places) == 1 or (curve.style != "dashed" and len(places) <= 60):
            for (x, y), (step, value) in zip(places, segment, strict=True):
                title = f"<title>{escape(curve.label)}, step {step:g}: {value:.5g}</title>"
                parts.append(f'<circle class="dot {curve.style} {curve.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.4">{title}</circle>')
    return "".join(parts)


def _thin(segment: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(segment) <= MAX_POINTS:
        return segment
    size = math.ceil(2 * len(segment) / MAX_POINTS)
    kept: set[tuple[float, float]] = {segment[0], segment[-1]}
    for start in range(0, len(segment), size):
        bucket = segment[start : start + size]
        kept |= {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
    return sorted(kept)


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round numbers 1, 2 or 5 x 10^n apart, the first at or below `low`, the last at or above `high`."""
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _tick_text(value: float, ticks: Sequence[float]) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    largest = max(abs(tick) for tick in ticks)
    if value == 0:
        return "0"
    if step >= 1000 and largest >= 10_000:
        size, letter = (1e6, "M") if largest >= 1e6 else (1e3, "k")
        return f"{value / size:,.{max(0, math.ceil(math.log10(size / step) - 1e-9))}f}{letter}"
    if largest < 1e-3 or largest >= 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
