"""Saying what ended a worker's process, from what Ray reports and what its log tells."""

from __future__ import annotations

import re
from pathlib import Path

SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received")
EXIT_CODE = re.compile(r"exit code[ =:]*'?(-?\d+)", re.IGNORECASE)


def describe_death(kind: str, message: str, log: str) -> str:
    """One clause: 'SIGKILL …', 'exit code 3', 'out of memory …'. `log` is the worker's error stream, where it can be read.

    A process that is ended by SIGKILL can say nothing more; one that crashes has its signal in the log.
    """
    if kind == "OutOfMemoryError" or "memory monitor" in message.lower():
        return "out of memory: Ray's memory monitor ended it"
    if found := SIGNAL.findall(log):
        return str(found[-1])
    if found := EXIT_CODE.findall(message):
        return f"exit code {found[-1]}"
    if "node" in kind.lower() or "node died" in message.lower() or "node has died" in message.lower():
        return "its node died"
    if "exit_actor" in message or "INTENDED" in message.upper().split("EXIT TYPE")[-1][:40]:
        return "it left by itself"
    return "SIGKILL, or a crash without a word (was it the kernel's out-of-memory killer?)"


def read_log(folder: str | None, pid: int | None) -> str:
    """The last 20 kB of the error stream of process `pid`, '' where it is not on this machine."""
    if folder is None or pid is None:
        return ""
    texts = []
    for path in Path(folder).glob(f"worker-*-{pid}.err"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            texts.append(file.read().decode(errors="replace"))
    return "\n".join(texts)
