"""Programs measured in turns, and tables of what came out."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).absolute().parent
ROOT = HERE.parents[1]
QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "TRANSFORMERS_VERBOSITY": "error"}


class Peer:
    """A driver script of this folder, started once in a Python of its own, which does its work each time it is asked.

    Between times it is stopped with all its processes, so that threads it left spinning take nothing from the others.
    """

    def __init__(self, python: str, script: str, *arguments: str | Path | int) -> None:
        self._command = [python, str(HERE / script), *map(str, arguments)]
        others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environment = others | QUIET | ({"PYTHONPATH": str(ROOT)} if python == sys.executable else {})

    def __enter__(self) -> Peer:
        """Starts it, and waits until everything is imported and loaded."""
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=self._environment,
            start_new_session=True,
        )  # fmt: skip
        self._answer()
        return self

    def measure(self) -> dict[str, Any]:
        """What the driver measured. Raises `RuntimeError` with the end of what it said when it has ended."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):  # `_answer` tells why
            print(file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError(f"{self._command} ended: {self._said.read()[-3000:].decode(errors='replace')}")
        os.killpg(self._process.pid, signal.SIGSTOP)
        return dict(json.loads(line))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._said.close()


def in_turns(peers: Mapping[str, Peer], repetitions: int) -> dict[str, dict[str, Any]]:
    """Each of the programs once, and again, so that all meet the same load; the median of each figure."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    with ExitStack() as stack:
        for peer in peers.values():
            stack.enter_context(peer)
        for _ in range(repetitions):
            for name, peer in peers.items():
                measured[name].append(peer.measure())
    return {name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in measured.items()}


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """A Markdown table, floats to four digits, with the load of the machine."""
    shown = [[_shown(value) for value in line] for line in [columns, *lines]]
    widths = [max(len(line[at]) for line in shown) for at in range(len(columns))]
    print(f"\n{title} (load {os.getloadavg()[0]:.1f})\n")
    for number, line in enumerate(shown):
        print("| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("| " + " | ".join("-" * width for width in widths) + " |")
    sys.stdout.flush()


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
