"""Progress of a stage on the terminal: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
CONSOLE = Console(stderr=True)
"""The one console: what is printed through it appears above a bar that is being drawn."""


class StageProgress:
    """A `twinkle_core.types.Progress` that draws one bar for a stage."""

    def __init__(self, console: Console, bars: Progress, stage: str) -> None:
        self._console, self._bars, self._stage = console, bars, stage
        self._task = bars.add_task(stage, total=None, text="")
        self._unit, self._total, self._done = "", None, 0
        self._line_at = time.monotonic()

    def start(self, description: str, total: int | None, unit: str) -> None:
        self._unit, self._total, self._done = unit, total, 0
        label = self._stage if description == self._stage else f"{self._stage}: {description}"
        self._bars.reset(self._task, total=total, description=label, text=f"0 {unit}")

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        self._done += amount
        of = f"/{self._total}" if self._total is not None else ""
        text = f"{self._done}{of} {self._unit}  " + "  ".join(f"{_label(k)} {_number(v)}" for k, v in facts.items())
        self._bars.update(self._task, advance=amount, text=text.strip())
        if not self._console.is_terminal and time.monotonic() - self._line_at > LINE_SECONDS:
            self._line_at = time.monotonic()
            self._console.print(f"  {self._stage}: {text.strip()}", highlight=False)


@contextmanager
def stage_bar(stage: str) -> Iterator[StageProgress]:
    """A bar that is there while the stage runs; what the stage made is said when it has gone."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE, disable=not CONSOLE.is_terminal, transient=True) as bars:
        yield StageProgress(CONSOLE, bars, stage)


def _label(name: str) -> str:
    return {"tokens_per_second": "tok/s", "consumed_train_tokens": "tokens"}.get(name, name)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
