from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import DamagedError, StorageError
from storage.lease import Holder, LeaseInfo, acquire, read_lease
from storage.store import Store, open_store

KEY = "leases/train/abc.json"

# Takes the lease, says so, and then obeys lines: 'lost' and 'release' answer on the output.
HOLD = """
import sys, time
from storage.lease import Holder, acquire
from storage.store import open_store
lease = acquire(open_store(sys.argv[1]), sys.argv[2], Holder.here(), ttl_seconds=float(sys.argv[3]))
print("none" if lease is None else f"held {lease.epoch}", flush=True)
for line in sys.stdin:
    print(lease.lost if line == "lost\\n" else lease.release(), flush=True)
"""


class HolderProcess:
    def __init__(self, store: Store, ttl_seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, store.url, KEY, str(ttl_seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def hold(store: Store) -> Iterator[Callable[[float], HolderProcess]]:
    held: list[HolderProcess] = []

    def start(ttl_seconds: float) -> HolderProcess:
        held.append(HolderProcess(store, ttl_seconds))
        return held[-1]

    yield start
    for holder in held:
        holder.end()


def wait_until(law: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def forge(store: Store, holder: Holder, expires_in_seconds: float, epoch: int = 4) -> None:
    info = {"holder": vars(holder), "epoch": epoch, "token": "t", "expires_at": time.time() + expires_in_seconds, "released": False}
    store.put(KEY, json.dumps(info).encode())


def test_a_lease_is_held_by_one_and_free_after_release(store: Store) -> None:
    assert read_lease(store, KEY) is None
    first = acquire(store, KEY, Holder.here())
    assert first is not None
    assert first.epoch == 1
    assert not first.lost
    info = read_lease(store, KEY)
    assert info is not None
    assert info.alive()
    assert info.holder == Holder.here()
    assert info.holder.pid == os.getpid()
    assert acquire(store, KEY, Holder.here()) is None
    assert first.release() is True
    assert first.release() is False
    released = read_lease(store, KEY)
    assert released is not None
    assert not released.alive()
    second = acquire(store, KEY, Holder.here())
    assert second is not None
    assert second.epoch == 2
    assert first.release() is False
    assert not second.lost
    second.release()


def test_a_lease_ends_with_its_block_even_by_an_error(store: Store) -> None:
    lease = acquire(store, KEY, Holder.here())
    assert lease is not None
    with pytest.raises(KeyError), lease:
        raise KeyError
    info = read_lease(store, KEY)
    assert info is not None
    assert info.released


def test_a_held_lease_is_renewed_past_its_ttl(store: Store) -> None:
    lease = acquire(store, KEY, Holder.here(), ttl_seconds=0.6)
    first = read_lease(store, KEY)
    assert lease is not None
    assert first is not None
    wait_until(lambda: time.time() > first.expires_at + 0.3)
    later = read_lease(store, KEY)
    assert later is not None
    assert later.alive()
    assert later.expires_at > first.expires_at
    assert later.epoch == 1
    assert not lease.lost
    assert acquire(store, KEY, Holder.here()) is None
    lease.release()


def test_a_holder_killed_on_this_boot_is_void_at_once(store: Store, hold: Callable[[float], HolderProcess]) -> None:
    holder = hold(3600)
    assert holder.read() == "held 1"
    assert acquire(store, KEY, Holder.here()) is None
    os.kill(holder.process.pid, signal.SIGKILL)
    wait_until(lambda: Path(f"/proc/{holder.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    lease = acquire(store, KEY, Holder.here())  # not reaped yet: a zombie holds nothing
    assert lease is not None
    assert lease.epoch == 2
    lease.release()
    holder.end()
    info = read_lease(store, KEY)
    assert info is not None
    assert info.epoch == 2


def test_a_pid_used_again_does_not_keep_a_lease(store: Store) -> None:
    forge(store, Holder.here(), 3600)
    assert acquire(store, KEY, Holder.here()) is None
    forge(store, replace(Holder.here(), started=Holder.here().started - 1), 3600)
    lease = acquire(store, KEY, Holder.here())
    assert lease is not None
    assert lease.epoch == 5
    lease.release()


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"boot_id": "", "pid_namespace": ""}])
def test_a_holder_elsewhere_is_void_only_when_expired(store: Store, elsewhere: dict[str, str]) -> None:
    gone = 2**22 + 1  # above the highest pid
    forge(store, replace(Holder.here(), host="other", pid=gone, **elsewhere), 3600)
    assert acquire(store, KEY, Holder.here()) is None
    forge(store, replace(Holder.here(), host="other", pid=gone, **elsewhere), 0.3)
    assert acquire(store, KEY, Holder.here()) is None
    time.sleep(0.35)
    lease = acquire(store, KEY, Holder.here())
    assert lease is not None
    assert lease.epoch == 5
    lease.release()
    forge(store, replace(Holder.here(), pid=gone), 3600)  # but here it is void at once
    lease = acquire(store, KEY, Holder.here())
    assert lease is not None
    lease.release()


def test_a_stopped_holder_that_was_overtaken_sees_it_and_leaves_the_newer_lease_alone(
    store: Store, hold: Callable[[float], HolderProcess]
) -> None:
    holder = hold(1)
    assert holder.read() == "held 1"
    assert holder.ask("lost") == "False"
    os.kill(holder.process.pid, signal.SIGSTOP)
    assert acquire(store, KEY, Holder.here()) is None  # alive until it expires
    info = read_lease(store, KEY)
    assert info is not None
    wait_until(lambda: time.time() > info.expires_at)
    lease = acquire(store, KEY, Holder.here())
    assert lease is not None
    assert lease.epoch == 2
    os.kill(holder.process.pid, signal.SIGCONT)
    assert holder.ask("lost") == "True"
    time.sleep(0.5)  # its renewal comes by
    assert holder.ask("lost") == "True"
    assert holder.ask("release") == "False"
    standing = read_lease(store, KEY)
    assert standing is not None
    assert standing.epoch == 2
    assert standing.holder.pid == os.getpid()
    assert standing.alive()
    assert not lease.lost
    assert lease.release() is True


def test_a_renewal_that_finds_another_epoch_says_lost(store: Store) -> None:
    lease = acquire(store, KEY, Holder.here())
    assert lease is not None
    assert lease.renew() is True
    forge(store, Holder.here(), 3600, epoch=2)
    assert lease.renew() is False
    assert lease.lost
    forge(store, Holder.here(), 3600, epoch=1)  # and for good: another token
    assert lease.renew() is False
    assert lease.lost
    assert lease.release() is False


def test_a_store_out_of_reach_costs_the_lease_only_after_its_ttl(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = acquire(store, KEY, Holder.here(), ttl_seconds=0.9)
    assert lease is not None

    def refuse(key: str) -> tuple[bytes, str]:
        raise StorageError("away")

    monkeypatch.setattr(store, "get_versioned", refuse)
    time.sleep(0.4)
    assert not lease.lost
    wait_until(lambda: lease.lost, seconds=5)
    monkeypatch.undo()
    wait_until(lambda: not lease.lost, seconds=5)  # nobody took it meanwhile
    assert lease.release() is True


def race(store: Store, number: int) -> list[str]:
    holders = [HolderProcess(store, 60) for _ in range(number)]
    try:
        return [holder.read() for holder in holders]
    finally:
        for holder in holders:
            holder.end()


def test_of_eight_racing_processes_one_holds_it(store: Store) -> None:
    forge(store, replace(Holder.here(), boot_id="another"), -1)  # an expired one, which all want to take over
    assert sorted(race(store, 8)) == ["held 5"] + ["none"] * 7


@pytest.mark.parametrize("taken_before", [False, True])
def test_of_racing_processes_one_holds_it_on_s3(s3_settings: dict[str, str], tmp_path: Path, taken_before: bool) -> None:
    store = open_store(f"s3://tests/{tmp_path.name}")
    if taken_before:
        forge(store, replace(Holder.here(), boot_id="another"), -1)
    assert sorted(race(store, 4)) == ["held 5" if taken_before else "held 1"] + ["none"] * 3


def test_a_lease_that_cannot_be_read_is_named(store: Store) -> None:
    for text in (b"{", b"[]", b'{"epoch": 1}'):
        store.put(KEY, text)
        with pytest.raises(DamagedError, match="leases/train/abc"):
            acquire(store, KEY, Holder.here())
    with pytest.raises(StorageError, match="above 0"):
        acquire(store, "leases/other", Holder.here(), ttl_seconds=0)


def test_expiry_and_release_alone_end_a_lease_elsewhere() -> None:
    holder = replace(Holder.here(), boot_id="another")
    info = LeaseInfo(holder=holder, epoch=1, token="t", expires_at=time.time() + 60, released=False)
    assert info.alive()
    assert not replace(info, released=True).alive()
    assert not replace(info, expires_at=time.time() - 1).alive()
