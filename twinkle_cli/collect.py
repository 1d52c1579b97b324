"""`twinkle artifacts gc`: what may be deleted is decided by pure functions, then the records go first and their files after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from storage import layout
from storage.artifact import ArtifactRecord, ArtifactRef
from storage.errors import DamagedError
from storage.lease import read_lease
from storage.store import ObjectInfo, Store, open_store
from twinkle_cli.artifacts import created, scan, size_text
from twinkle_core.checkpoint.manifest import read_head

Identity = tuple[str, str]
"""(stage, key)."""
HOUR = 3600.0
HEAD = "HEAD"
MANIFEST = layout.checkpoint_manifest_key("").lstrip("/")
ABANDONED_HOURS = 14 * 24.0
"""A run that has neither ended nor used anything for this long is no longer in progress."""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """What is being worked on."""

    leased: frozenset[Identity]
    """Being computed by somebody alive."""
    used: frozenset[Identity]
    """Named by a run that has not ended."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What goes."""

    records: list[ArtifactRecord] = field(default_factory=list)
    objects: list[ObjectInfo] = field(default_factory=list)
    """Files, then checkpoint heads, of those records and of work that nobody finished: a manifest without a head is kept (`headless`)."""
    num_kept: int = 0
    held_back: str = ""
    """Why no record is deleted at all, where that is so."""


def reachable(records: Mapping[Identity, ArtifactRecord], roots: Iterable[Identity]) -> set[Identity]:
    """The roots and, through their inputs, everything they were made from."""
    seen: set[Identity] = set()
    waiting = list(roots)
    while waiting:
        identity = waiting.pop()
        if identity in seen:
            continue
        seen.add(identity)
        if identity in records:
            waiting += [(ref.stage, ref.key) for ref in records[identity].inputs.values() if isinstance(ref, ArtifactRef)]
    return seen


def newest(records: Iterable[ArtifactRecord], keep_last: int) -> set[Identity]:
    """The `keep_last` newest of each stage."""
    stages: dict[str, list[ArtifactRecord]] = defaultdict(list)
    for record in sorted(records, key=created, reverse=True):
        stages[record.stage].append(record)
    return {(record.stage, record.key) for listed in stages.values() for record in listed[:keep_last]}


def busy(store: Store, now: float) -> Busy:
    """Live leases, and what unfinished runs have named as theirs."""
    leased = set()
    for info in store.list(layout.leases_prefix()):
        lease = read_lease(store, info.key)
        if lease is not None and lease.alive():
            stage, name = info.key.split("/")[-2:]
            leased.add((stage, name.removesuffix(".json")))
    runs: dict[str, list[ObjectInfo]] = defaultdict(list)
    for info in store.list(layout.runs_prefix()):
        runs[info.key.split("/")[1]].append(info)
    used: set[Identity] = set()
    for run_id, objects in runs.items():
        ended = any(info.key == layout.run_end_key(run_id) for info in objects)
        if not ended and max(info.modified for info in objects) > now - ABANDONED_HOURS * HOUR:
            parts = [info.key.split("/") for info in objects]
            used |= {(part[3], part[4]) for part in parts if len(part) == 5 and part[2] == "uses"}
    return Busy(leased=frozenset(leased), used=frozenset(used))


def make_plan(
    records: Collection[ArtifactRecord],
    unreadable: Collection[Identity],
    objects: Iterable[ObjectInfo],
    working: Busy,
    *,
    keep_last: int,
    oldest_unfinished: float,
    listed: Collection[tuple[str, str, str]] = (),
) -> Plan:
    """What may go. `objects` are all data files and checkpoint heads; record-less ones newer than `oldest_unfinished` (unix seconds) stay.

    `listed` are the checkpoints that heads name, as (stage, key, attempt). A live computation that no run has named may read any
    record, and an unreadable record may name any: then all records stay.
    """
    by_identity = {(record.stage, record.key): record for record in records}
    published = {identity for identity in by_identity if identity[0] == "publish"}
    kept = reachable(by_identity, published | newest(records, keep_last) | working.used | working.leased)
    unnamed = working.leased - working.used
    held_back = ""
    if unreadable:
        stage, key = min(unreadable)
        held_back = f"{stage} {key[:12]} cannot be read, so what it was made from is not known: all finished artifacts stay"
        kept |= by_identity.keys()
    if unnamed:
        stage, key = min(unnamed)
        held_back = f"{stage} {key[:12]} is being computed by a program that does not say what it reads: all finished artifacts stay"
        kept |= by_identity.keys()
    doomed = [record for identity, record in by_identity.items() if identity not in kept]
    groups: dict[tuple[str, str, str], list[ObjectInfo]] = defaultdict(list)
    for info in objects:
        groups[_place(info.key)].append(info)
    stays = kept | set(unreadable)
    going: list[ObjectInfo] = []
    for (stage, key, attempt), infos in sorted(groups.items(), key=lambda group: (group[0][2] == HEAD, group[0])):
        abandoned = max(info.modified for info in infos) < oldest_unfinished
        needed = attempt == HEAD or (stage, key, attempt) in listed or (stage, key) in unreadable
        needed = needed or (stage, key) in working.leased  # the computation may go on with a killed one's finished parts, however old
        if _may_go(by_identity.get((stage, key)), (stage, key) in stays, attempt, needed, abandoned):
            going += infos
    return Plan(records=doomed, objects=going, num_kept=len(by_identity) - len(doomed), held_back=held_back)


def _place(key: str) -> tuple[str, str, str]:
    """(stage, key, attempt) of a data file; a checkpoint's head is its training's attempt 'HEAD'."""
    parts = key.split("/")
    return (parts[1], parts[2], parts[3]) if parts[0] == layout.all_data_prefix() else ("train", parts[1], HEAD)


def _may_go(record: ArtifactRecord | None, kept: bool, attempt: str, needed: bool, abandoned: bool) -> bool:
    """Whether one attempt's files may go: those of a deleted record, and old ones that no record, head or computation needs."""
    if record is not None and not kept:
        return True
    if kept and (record is None or attempt == record.attempt or needed):
        return False
    return abandoned


def listed_checkpoints(store: Store, heads: Iterable[ObjectInfo]) -> tuple[set[tuple[str, str, str]], set[Identity]]:
    """(stage, key, attempt) of each checkpoint that a head names, which a damaged last one falls back to; trainings with a broken head."""
    listed, broken = set(), set()
    for info in heads:
        train_key = info.key.split("/")[1]
        try:
            listed |= {_place(line.manifest) for line in read_head(store, train_key)[0].checkpoints}
        except DamagedError:
            broken.add(("train", train_key))
    return listed, broken


def headless(objects: Iterable[ObjectInfo]) -> set[Identity]:
    """Trainings that have committed and whose head is gone: running them again rebuilds it. A head goes last when it is deleted here."""
    places = [(info.key.rsplit("/", 1)[-1], *_place(info.key)) for info in objects]
    with_head = {(stage, key) for _, stage, key, attempt in places if attempt == HEAD}
    return {(stage, key) for name, stage, key, _ in places if name == MANIFEST} - with_head


def collect(store_url: str, *, keep_last: int, min_age_hours: float, dry_run: bool, now: float, say: Callable[[str], object]) -> Plan:
    """Plans, says what goes and how many bytes, and deletes it unless `dry_run`."""
    store = open_store(store_url)
    heads = store.list(layout.checkpoints_prefix())
    objects = store.list(layout.all_data_prefix()) + heads
    working = busy(store, now)  # before the records: what is committed from here on is not in the listing of files, or is leased
    records, unreadable = scan(store)
    for _, _, problem in unreadable:
        say(f"kept, although unreadable: {problem}")
    listed, broken = listed_checkpoints(store, heads)
    damaged = {(stage, key) for stage, key, _ in unreadable} | broken | headless(objects)
    oldest_unfinished = now - min_age_hours * HOUR
    plan = make_plan(records, damaged, objects, working, keep_last=keep_last, oldest_unfinished=oldest_unfinished, listed=listed)
    verb = "would delete" if dry_run else "deleting"
    for record in plan.records:
        say(f"{verb} {record.stage} {record.key[:12]}  {size_text(sum(entry.size for entry in record.files))}")
    if not dry_run:
        for record in plan.records:
            store.delete(layout.record_key(record.stage, record.key))
        for info in plan.objects:
            store.delete(info.key)
        store.sweep(oldest_unfinished)
    if plan.held_back:
        say(plan.held_back)
    freed = size_text(sum(info.size for info in plan.objects))
    say(f"{verb.replace('ing', 'ed')} {len(plan.records)} artifacts and {len(plan.objects)} files, {freed}; kept {plan.num_kept} artifacts")
    return plan
