"""A small process that outlives the process which started a local Ray, and ends what is left of that Ray.

Ray's own agents hold each other's pipes open and stay for many minutes when their driver is killed. This file is run by its
path, `guardian.py DRIVER_PID RAY_FOLDER`, and imports only the standard library, so that it costs about 10 MB. Its standard
input is a pipe from the driver: a byte says that Ray was shut down, the end of the pipe that the driver is gone. Until
then it notes, about twice a second, the processes of that Ray: the driver's children that run a program of Ray's own package, and
all that descend from them. A process is a pid and its start time, so a pid that was given to another process is left alone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

NOTE_SECONDS = 0.5
NOTE_SHARE = 0.02
"""The most of one core that noting may take, where thousands of processes run."""
GRACE_SECONDS = 2.0
"""What Ray gets to end by itself, and then again after SIGTERM."""

Tree = dict[int, int]
"""pid -> start time, in clock ticks since boot."""


def read_stat(pid: int) -> tuple[int, int] | None:
    """Parent pid and start time (fields 4 and 22 of proc_pid_stat(5)), or None when the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def is_alive(pid: int, started: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat[1] == started


def all_processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent pid, start time) of every process."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def runs_from(folder: str, pid: int) -> bool:
    """Whether the program, or the script that an interpreter (with at most one option) runs, lies in `folder`."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return any(word.startswith(folder + os.sep) for word in file.read().split("\0")[:3])
    except OSError:
        return False


def find_tree(known: Tree, is_root: Callable[[int, int], bool]) -> Tree:
    """The `known` processes that live, the processes for which `is_root(pid, parent)`, and all their descendants."""
    processes = all_processes()
    tree = {pid: start for pid, (parent, start) in processes.items() if known.get(pid) == start or is_root(pid, parent)}
    grown = True
    while grown:
        below = {pid: start for pid, (parent, start) in processes.items() if parent in tree and pid not in tree}
        tree.update(below)
        grown = bool(below)
    return tree


def watch(driver: int, ray_folder: str, pipe: int) -> Tree:
    """Notes the processes of the driver's Ray until the driver says that Ray was shut down, or is gone."""
    stat = read_stat(driver)
    started = stat[1] if stat is not None else -1
    me = os.getpid()
    noted: Tree = {}
    while is_alive(driver, started):  # a forked child of the driver may hold the pipe open
        began = time.monotonic()
        found = find_tree(noted, lambda pid, parent: parent == driver and pid != me and runs_from(ray_folder, pid))
        if select.select([pipe], [], [], 0)[0]:
            break  # what is new in `found` may belong to the next Ray of the same driver
        noted = found
        if select.select([pipe], [], [], max(NOTE_SECONDS, (time.monotonic() - began) / NOTE_SHARE))[0]:
            break
    return find_tree(noted, lambda pid, parent: False)


def end(tree: Tree) -> None:
    """Waits for the processes of `tree` to end, then asks them to, then makes them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        tree = await_end(tree)
        for pid, started in tree.items():
            if is_alive(pid, started):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue


def await_end(tree: Tree) -> Tree:
    """What is left of `tree`, with its descendants, after the grace."""
    deadline = time.monotonic() + GRACE_SECONDS
    while tree and time.monotonic() < deadline:
        time.sleep(0.1)
        tree = find_tree(tree, lambda pid, parent: False)
    return tree


def main(arguments: list[str]) -> None:
    driver, ray_folder = int(arguments[0]), arguments[1]
    if os.fork():  # a child of nobody: the driver has none to wait for
        os._exit(0)
    end(watch(driver, ray_folder, sys.stdin.fileno()))


if __name__ == "__main__":
    main(sys.argv[1:])
