"""Who computes this key now. A lease is one object, moved only by compare-and-swap; a dead holder cannot keep it.

A holder on this very boot whose process is gone is void at once; any other when `expires_at` has passed. Each take-over
raises the epoch, and a released lease stays in the store so that the epoch never falls. A lease saves work; it does not
make commits safe (a holder may be stopped right after asking `lost`), which is what conditional writes and epochs do.
Wall clocks of two machines may differ by a part of the ttl, not more.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.errors import DamagedError, NotFoundError, StorageError
from storage.store import Store

_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process, so that another one can tell whether it still lives."""

    host: str  # for people
    boot_id: str  # of the running kernel; '' where there is no /proc
    pid_namespace: str  # 'pid:[4026531836]': a pid means something only inside it
    pid: int
    started: int  # clock ticks after boot, since pids are used again

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace, started = os.readlink("/proc/self/ns/pid"), _start_time(pid) or 0
        except FileNotFoundError:  # not Linux: only expiry tells
            boot_id, namespace, started = "", "", 0
        return cls(host=socket.gethostname(), boot_id=boot_id, pid_namespace=namespace, pid=pid, started=started)

    def is_gone(self) -> bool:
        """True only where it is certain: same boot, same pid namespace, and no such process any more."""
        here = Holder.here()
        if not self.boot_id or (self.boot_id, self.pid_namespace) != (here.boot_id, here.pid_namespace):
            return False
        started = _start_time(self.pid)
        if started is not None:
            return started != self.started
        try:
            os.kill(self.pid, 0)  # signal 0 only asks: /proc may hide other users' processes, a zombie has ended
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _is_zombie(self.pid)


@dataclass(frozen=True, kw_only=True)
class LeaseInfo:
    """What the store says about a lease."""

    holder: Holder
    epoch: int  # 1, 2, …: one more at each take-over
    token: str  # of one `acquire`
    expires_at: float  # unix seconds
    released: bool

    def alive(self) -> bool:
        """Whether somebody holds it."""
        return not self.released and time.time() < self.expires_at and not self.holder.is_gone()


class Lease:
    """A held lease, renewed by a thread every third of its ttl. As a context manager it is released at the end.

    Raises FencedError nowhere by itself: long work asks `lost` at each step.
    """

    def __init__(self, store: Store, key: str, info: LeaseInfo, ttl_seconds: float) -> None:
        self._store, self._key, self._info, self._ttl_seconds = store, key, info, ttl_seconds
        self._lock = threading.Lock()
        self._taken, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease {key}", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._info.epoch

    @property
    def lost(self) -> bool:
        """Somebody else took it, or it could not be renewed in time. The latter ends if a later renewal finds it untaken."""
        return self._taken.is_set() or time.time() >= self._info.expires_at

    def renew(self) -> bool:
        """Extends it by the ttl from now; False when it is lost. StorageError when the store does not answer."""
        with self._lock:
            return not self._ended.is_set() and self._move(expires_at=time.time() + self._ttl_seconds)

    def release(self) -> bool:
        """Gives it up; False when it was no longer ours, and then the newer one is left alone."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            return not self._info.released and self._move(released=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):  # a store out of reach must not hide how the work ended; the lease expires by itself
            self.release()

    def _move(self, *, expires_at: float | None = None, released: bool = False) -> bool:
        if self._taken.is_set():
            return False
        for _ in range(_TRIES):
            standing, version = _read(self._store, self._key)
            if standing is None or (standing.epoch, standing.token) != (self._info.epoch, self._info.token):
                break
            moved = replace(standing, expires_at=standing.expires_at if expires_at is None else expires_at, released=released)
            if self._store.compare_and_swap(self._key, _dumps(moved), version):
                self._info = moved
                return True
        self._taken.set()
        return False

    def _keep(self) -> None:
        while not self._ended.wait(self._ttl_seconds / 3):
            with suppress(OSError):  # tried again a third later; `lost` tells when that was too often
                if not self.renew() and self._taken.is_set():
                    return


def acquire(store: Store, lease_key: str, holder: Holder, ttl_seconds: float = 30.0) -> Lease | None:
    """The lease, or None when somebody alive holds it (another thread of this process too)."""
    if ttl_seconds <= 0:
        raise StorageError(f"ttl_seconds={ttl_seconds} of lease {lease_key!r} must be above 0")
    for _ in range(_TRIES):
        standing, version = _read(store, lease_key)
        if standing is not None and standing.alive():
            return None
        info = LeaseInfo(
            holder=holder,
            epoch=standing.epoch + 1 if standing else 1,
            token=uuid.uuid4().hex,
            expires_at=time.time() + ttl_seconds,
            released=False,
        )
        if store.compare_and_swap(lease_key, _dumps(info), version):
            return Lease(store, lease_key, info, ttl_seconds)
    return None  # others keep moving it, so somebody alive is there


def read_lease(store: Store, key: str) -> LeaseInfo | None:
    """None when it was never taken; DamagedError when it cannot be read."""
    return _read(store, key)[0]


def _read(store: Store, key: str) -> tuple[LeaseInfo | None, str | None]:
    try:
        data, version = store.get_versioned(key)
    except NotFoundError:
        return None, None
    try:
        values = json.loads(data)
        holder = Holder(**_typed(Holder, values["holder"]))
        return LeaseInfo(**{**_typed(LeaseInfo, values), "holder": holder}), version
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"the lease {key!r} in {store.url} cannot be read ({error}): delete it if nobody computes there") from error


def _dumps(info: LeaseInfo) -> bytes:
    return json.dumps(asdict(info), sort_keys=True).encode()


_TYPES: Mapping[str, type] = {"holder": dict, "epoch": int, "pid": int, "started": int, "expires_at": float, "released": bool}


def _typed(cls: type[Any], values: Any) -> dict[str, Any]:
    """The fields of a dataclass and no others; ValueError."""
    names = {field.name for field in fields(cls)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError(f"fields are {sorted(names)}, got {values!r}")
    for name, value in values.items():
        if type(value) is not _TYPES.get(name, str):
            raise ValueError(f"{name!r} is {value!r}")
    return values


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on; None when it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the second, a name, may hold blanks
    except (FileNotFoundError, ProcessLookupError):
        return None


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a running process started (field 22); None for none and for a zombie."""
    found = _stat(pid)
    return int(found[19]) if found and found[0] not in "ZX" else None


def _is_zombie(pid: int) -> bool:
    found = _stat(pid)
    return found is not None and found[0] in "ZX"
