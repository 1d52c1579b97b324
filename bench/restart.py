"""Where the time goes when a run is started again: a second run that reuses everything, and from kill -9 in training to the next step.

    .venv/bin/python bench/restart.py [HOME]        # HOME: a folder in which `twinkle run sft demo` has finished (default: a new one)

Prints seconds. Servers run already in both measurements, as they do for scheduled runs; starting them is measured apart.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TWINKLE = [sys.executable, "-c", "from twinkle_cli.main import main; main()"]


def main() -> None:
    home = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    environment = {**os.environ, "TWINKLE_HOME": str(home)}
    figures: dict[str, float] = {}

    def twinkle(*arguments: str) -> float:
        began = time.monotonic()
        subprocess.run([*TWINKLE, *arguments], env=environment, check=True, capture_output=True)
        return time.monotonic() - began

    try:
        figures["start Prefect and MLflow, run (everything reused, or the first run)"] = twinkle("run", "sft", "demo")
        figures["second run, all reused, wall"] = twinkle("run", "sft", "demo")
        figures["  of it: imports"] = _imports()
        figures |= _kill_and_resume(home, environment)
    finally:
        twinkle("down")
    for name, seconds in figures.items():
        print(f"{seconds:8.1f} s  {name}")


def _imports() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import flows.sft"], check=True)
    return time.monotonic() - began


def _kill_and_resume(home: Path, environment: dict[str, str]) -> dict[str, float]:
    store = home / "store"
    for part in ("records/train", "data/train", "checkpoints", "leases/train"):
        shutil.rmtree(store / part, ignore_errors=True)
    command = [*TWINKLE, "run", "sft", "demo", "--set", "checkpoint.save_every=1"]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait(lambda: _steps(store) >= 2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    killed, done = time.monotonic(), _steps(store)
    again = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait(lambda: _steps(store) > done)
    seconds = time.monotonic() - killed
    os.kill(again.pid, signal.SIGKILL)
    again.wait()
    return {"kill -9 in training to the next step, computed and committed": seconds}


def _steps(store: Path) -> int:
    for head in store.glob("checkpoints/*/HEAD.json"):
        checkpoints = json.loads(head.read_bytes())["checkpoints"]
        return checkpoints[0]["step"] if checkpoints else 0
    return 0


def _wait(condition: Callable[[], bool], timeout_seconds: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not get there")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
