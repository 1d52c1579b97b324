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
from typing import Any

PR_SET_PDEATHSIG = 1
"""Linux: the signal to get when the parent ends."""


def serve(work: Callable[[], dict[str, Any]]) -> None:
    """Says that it is ready, then answers each line of the standard input with what `work` returns, 'seconds' and 'cpu_seconds' added
    where it has none.

    CPU seconds are those of this process and of its children that have ended. Whatever else is printed goes to the standard error.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the asker may be killed while this is stopped
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    for _ in sys.stdin:
        began, cpu_began = time.perf_counter(), cpu_seconds()
        facts = work()
        measured = {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - cpu_began}
        print(json.dumps(measured | facts), file=answers, flush=True)


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
