"""Starting a Ray of our own on this machine, and ending all of it, whatever becomes of this process."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from twinkle_core.infra import guardian
from twinkle_core.infra.environment import names_to_hide

OBJECT_STORE_BYTES = 200_000_000
SYSTEM_CONFIG = {
    "worker_niceness": 0,  # Ray's own 15 is for tasks beside other work; training is the work
    "prestart_worker_first_driver": False,  # one idle process for each core, which actors with an environment cannot use
}
NOTICES = "ray._private.authentication.authentication_token_setup"
"""Warns at every start that tokens are on, which is Ray's default, and stays."""


class LocalRay:
    """A Ray that this process started, with a guardian (see `guardian`) that ends it when this process cannot."""

    def __init__(self) -> None:
        self._guardian = start_guardian()
        try:
            with quiet_notices():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    _system_config=SYSTEM_CONFIG,
                )
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Ends Ray. The guardian ends what is left a few seconds later, and goes. May be called twice."""
        write, self._guardian = self._guardian, None
        try:
            ray.shutdown()
        finally:
            if write is not None:
                with suppress(BrokenPipeError):  # somebody ended the guardian
                    os.write(write, b".")
                os.close(write)


class RayLink:
    """This process's way to Ray: the Ray it already uses, the cluster at `address`, or a local one of its own."""

    def __init__(self, address: str | None = None) -> None:
        self._local: LocalRay | None = None
        self._joined = False
        if not ray.is_initialized():
            if address is None or address == "local":
                self._local = LocalRay()
            else:
                connect(address)
                self._joined = True
        self.hidden: tuple[str, ...] = () if self._joined else names_to_hide()
        """Variables that workers inherit from this process and must not see. A cluster's nodes have their own environment."""

    @property
    def is_own(self) -> bool:
        return self._local is not None

    def close(self) -> None:
        """Ends the Ray that was started here, or leaves the one that was joined. May be called twice.

        Garbage is collected first: Ray ends the whole process when another thread's collector drops a reference of Ray's while it shuts
        down, and the frames of a lost worker's error hold some in cycles.
        """
        gc.collect()
        if self._joined and ray.is_initialized():
            ray.shutdown()
        if self._local is not None:
            self._local.shutdown()
        self._joined, self._local = False, None


def log_folder() -> str | None:
    """Where the workers of this machine log; None without Ray."""
    node = ray._private.worker._global_node if ray.is_initialized() else None
    return None if node is None else str(node.get_logs_dir_path())


def connect(address: str) -> None:
    """Joins a Ray that somebody else runs."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


def start_guardian() -> int | None:
    """The write end of the new guardian's pipe. None where there is no /proc to find processes in."""
    if sys.platform != "linux":
        return None
    read, write = os.pipe()
    package = os.path.dirname(os.path.abspath(ray.__file__))
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), package],
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # an interrupt from the terminal is not for it
            check=True,
        )
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    return write


@contextmanager
def quiet_notices() -> Iterator[None]:
    """Keeps Ray's notice about tokens from the terminal; its errors, and all its other warnings, show."""
    logger = logging.getLogger(NOTICES)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
