"""How a program to be measured is driven: one line comes in, the work is done once, one line of JSON goes out.

Needs nothing but Python, since each program runs in an environment of its own.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
"""Linux: the signal to get when the parent ends."""


class Asker:
    """Whoever measures. Whatever else is printed goes to the standard error.

    CPU seconds are those of this process and of its children that have ended. `peak_mb` is the most memory (resident, MiB) that the
    process has held between a `wait` and its `answer`; where Linux does not let it be set back, since the process began.
    """

    def __init__(self) -> None:
        """Says that the program is ready."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the asker may be killed while this is stopped
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        print("{}", file=self._answers, flush=True)

    def wait(self) -> None:
        """Until the work is asked for. Ends the process when nobody asks any more."""
        if not sys.stdin.readline():
            os._exit(0)
        _forget_peak()
        self._began, self._cpu_began = time.perf_counter(), cpu_seconds()

    def answer(self, facts: dict[str, Any]) -> None:
        """The facts of the work since `wait`, 'seconds', 'cpu_seconds' and 'peak_mb' added where they have none."""
        measured = {"seconds": time.perf_counter() - self._began, "cpu_seconds": cpu_seconds() - self._cpu_began, "peak_mb": peak_mb()}
        print(json.dumps(measured | facts), file=self._answers, flush=True)


def serve(work: Callable[[], dict[str, Any]]) -> None:
    """Answers each question with what `work` returns."""
    asker = Asker()
    while True:
        asker.wait()
        asker.answer(work())


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def peak_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
