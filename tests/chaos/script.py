"""Which process of a training shall die when, and what happened: on disk, so that every process of it knows, dead or alive.

The folder of a training holds `plan.json`, the kills in their order; `killed-N`, made the moment before the N-th kill; and
`journal.jsonl`, to which every process appends: events, kills, what was said, which rows a worker saw, what was committed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from twinkle_core.infra.guardian import read_stat

VICTIMS = ("driver", "worker 0", "worker 1", "writer", "uploader")
"""Whose event it is. The writer and the uploader are threads of worker 0, which in local mode is the driver's process."""
MODES = {
    "driver": ("before", "after"),
    "worker 0": ("before", "after"),
    "worker 1": ("before", "after"),
    "writer": ("before", "half", "after"),
    "uploader": ("before", "half", "after"),
}


@dataclass(frozen=True, kw_only=True)
class PlannedKill:
    """SIGKILL of the process in which the `event`-th event of `victim` happens, counted from the kill before this one."""

    victim: str
    event: int
    mode: str
    """'before' it, 'after' it, or when 'half' of the bytes are written, where the event writes a file."""
    since: str = ""
    """Counts only from the first line of this kind in the journal on, e.g. 'recorded'."""


class Script:
    """The plan and the journal of one training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, plan: tuple[PlannedKill, ...]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps([asdict(kill) for kill in plan]))

    def plan(self) -> tuple[PlannedKill, ...]:
        return tuple(PlannedKill(**kill) for kill in json.loads((self.folder / "plan.json").read_text()))

    def num_done(self) -> int:
        """Kills that happened."""
        return len(list(self.folder.glob("killed-*")))

    def note(self, kind: str, **facts: Any) -> None:
        """One line of the journal; whole, whichever process dies next."""
        line = json.dumps({"kind": kind, "pid": os.getpid(), "time": time.time(), **facts}).encode() + b"\n"
        handle = os.open(self.folder / "journal.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal.jsonl").read_bytes().splitlines()]


class Trigger:
    """Counts the events of one process, and kills it when the plan says so."""

    def __init__(self, script: Script, *, outlives_kills: bool) -> None:
        """`outlives_kills`: of a driver, whose workers are killed and replaced. A worker serves the kill that is next when it starts
        and no other: it is doomed once that has happened elsewhere."""
        self.script = script
        self._plan = script.plan()
        self._next = script.num_done()
        self._outlives_kills = outlives_kills
        self._counts = dict.fromkeys(VICTIMS, 0)
        self._lock = threading.Lock()
        stat = read_stat(os.getpid())
        script.note("process", started=stat[1] if stat is not None else 0)

    def wrap(self, victim: str, name: str, original: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """`original` as an event of `victim`; `half(*args)` does half of it."""

        def event(*args: Any, **kwargs: Any) -> Any:
            mode = self._reach(victim, name)
            if mode == "half" and half is not None:
                half(*args, **kwargs)
                self._kill(victim, name, mode)
            if mode == "before":
                self._kill(victim, name, mode)
            result = original(*args, **kwargs)
            if mode is not None:
                self._kill(victim, name, "after")
            return result

        return event

    def patch(self, victim: str, owner: Any, name: str, half: Callable[..., Any] | None = None) -> None:
        """Replaces a function of a module or class."""
        label = f"{getattr(owner, '__name__', owner).rpartition('.')[2]}.{name}"
        setattr(owner, name, self.wrap(victim, label, getattr(owner, name), half))

    def _reach(self, victim: str, name: str) -> str | None:
        """Counts an event; how the process is to die in it, if it is."""
        self.script.note("event", victim=victim, name=name)
        with self._lock:
            done = self.script.num_done()
            if done != self._next:
                if not self._outlives_kills:
                    return None
                self._next, self._counts = done, dict.fromkeys(VICTIMS, 0)
            if done == len(self._plan) or self._plan[done].victim != victim or self._comes_later(self._plan[done].since):
                return None
            self._counts[victim] += 1
            return self._plan[done].mode if self._plan[done].event == self._counts[victim] else None

    def _comes_later(self, since: str) -> bool:
        return since != "" and all(line["kind"] != since for line in self.script.journal())

    def _kill(self, victim: str, name: str, mode: str) -> NoReturn:
        number = self._next
        self.script.note("kill", number=number, victim=victim, name=name, mode=mode)
        (self.script.folder / f"killed-{number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")
