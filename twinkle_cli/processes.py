"""Processes of ours that outlive the command that started them, and how to stop exactly those. Linux: reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process that no later one can be mistaken for, although the kernel gives its number out again."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to the start of the process."""
    boot_id: str

    def alive(self) -> bool:
        return identify(self.pid) == self


@dataclass(frozen=True, kw_only=True)
class _Stat:
    state: str
    parent: int
    group: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this number now; None when there is none, or only a zombie."""
    stat = _stat(pid)
    return None if stat is None else ProcessId(pid=pid, start_ticks=stat.start_ticks, boot_id=_boot_id())


def start(command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> ProcessId:
    """Start `command` in `folder` as the leader of its own process group, detached from the terminal, output appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    identity = identify(process.pid)
    if identity is None:  # ended before we looked; a number that no process has
        return ProcessId(pid=process.pid, start_ticks=-1, boot_id=_boot_id())
    process.returncode = 0  # it lives on without us: no warning when the handle is collected
    return identity


def stop(leader: ProcessId, grace_seconds: float = 20.0) -> bool:
    """End `leader` and everything it started: SIGTERM to the leader, SIGKILL to what is left after the grace. False if it was not running.

    The tree is read before the first signal, since children of a dead parent belong to nobody. Signals go through a pidfd of a
    process whose start time was checked: a number that was given out again is never hit.
    """
    if not leader.alive():
        return False
    members = tree(leader.pid)
    _signal(leader, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while leader.alive() and time.monotonic() < deadline:
        members |= tree(leader.pid)
        time.sleep(0.05)
    for member in members:
        _signal(member, signal.SIGTERM)
    while any(member.alive() for member in members) and time.monotonic() < deadline + 2:
        time.sleep(0.05)
    for member in members:
        _signal(member, signal.SIGKILL)
    while any(member.alive() for member in members) and time.monotonic() < deadline + 10:
        time.sleep(0.05)
    return True


def tree(root: int) -> set[ProcessId]:
    """`root`, all its descendants, and the members of their process groups."""
    stats = dict(_stats())
    found = {root} & stats.keys()
    while True:
        groups = {stats[pid].group for pid in found if stats[pid].group == pid}  # only groups that one of ours leads
        more = {pid for pid, stat in stats.items() if stat.parent in found or stat.group in groups} | found
        if more == found:
            return {ProcessId(pid=pid, start_ticks=stats[pid].start_ticks, boot_id=_boot_id()) for pid in found}
        found = more


def _signal(target: ProcessId, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(target.pid)
        try:
            if target.alive():
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _stats() -> Iterator[tuple[int, _Stat]]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            yield int(entry.name), stat


def _stat(pid: int) -> _Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may hold spaces and brackets; proc(5) numbers this field 3
    return None if fields[0] in "ZX" else _Stat(state=fields[0], parent=int(fields[1]), group=int(fields[2]), start_ticks=int(fields[19]))


def _boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
