"""Starts Ray's worker processes by fork, of a process that has imported torch, transformers and peft: that is nearly all of a start.

Ray starts a worker with `py_executable default_worker.py …`. The one that `executable` names hands arguments, environment and
output to the server, which forks; it ends when the fork does. Ray goes by the pid that the worker itself tells. The server ends with
its standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRELOADED = ("torch", "transformers", "peft", "tests.chaos.armed_worker")
"""Not Ray: it reads its part of the environment, of which each worker has its own, when it is imported."""


@contextmanager
def worker_server(folder: Path) -> Iterator[str]:
    """The `py_executable` of Ray's runtime environments."""
    address = folder / "socket"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server of workers did not start"
        yield shlex.join([sys.executable, "-I", "-S", __file__, "ask", str(address)])
    finally:
        server.communicate(timeout=30)


def ask(address: str, arguments: list[str]) -> None:
    """Has a worker started with this process's environment and output, and waits for its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [1, 2])
        connection.sendall(request)
        connection.recv(1)


def serve(address: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(connection)
        connection.close()


def _become(connection: socket.socket) -> None:
    """The worker of the request, in this process."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        head, outputs, _, _ = socket.recv_fds(connection, 8, 2)
        request = json.loads(_read(connection, int.from_bytes(head, "big")))
        for number, output in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
            os.dup2(output, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = request["arguments"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        assert threading.active_count() == 1
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[2], sys.argv[3:])
