"""`twinkle artifacts list | show | lineage | verify`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import click
from rich.console import Console
from rich.table import Table

from storage import layout
from storage.artifact import ArtifactRecord, ArtifactRef, SourceRef, read_record, verify_record
from storage.errors import DamagedError
from storage.store import Store, open_store
from twinkle_core.errors import ConfigError


def scan(store: Store, stage: str | None = None) -> tuple[list[ArtifactRecord], list[tuple[str, str, str]]]:
    """(records, oldest first; (stage, key, problem) of each record that cannot be read)."""
    records, unreadable = [], []
    for info in store.list(layout.artifacts_prefix(stage)):
        record_stage, name = info.key.split("/")[-2:]
        key = name.removesuffix(".json")
        try:
            record = read_record(store, record_stage, key)
        except DamagedError as error:
            unreadable.append((record_stage, key, str(error)))
            continue
        if record is not None:  # deleted since it was listed
            records.append(record)
    return sorted(records, key=created), unreadable


def created(record: ArtifactRecord) -> float:
    """Unix seconds; 0 where the maker did not say."""
    value = record.provenance.get("created", 0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def size_text(num_bytes: float) -> str:
    """`1.5 MB` for 1,500,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def find(records: Iterable[ArtifactRecord], prefix: str) -> ArtifactRecord:
    """The one record whose key begins with `prefix` (or is written STAGE/PREFIX). Raises `ConfigError` for none or several."""
    stage, _, start = prefix.rpartition("/")
    found = [record for record in records if record.key.startswith(start) and stage in ("", record.stage)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"no artifact's key begins with '{prefix}'; `twinkle artifacts list` shows them")
    raise ConfigError(
        f"'{prefix}' begins several keys: {', '.join(f'{r.stage}/{r.key[:12]}' for r in found)}; give more letters, or STAGE/KEY"
    )


def show_list(store_url: str, stage: str | None) -> None:
    """A line an artifact."""
    records, unreadable = scan(open_store(store_url), stage)
    table = Table("stage", "key", "made", "size", "files", "run", box=None, header_style="bold")
    for record in records:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(created(record)))
        size = size_text(sum(entry.size for entry in record.files))
        table.add_row(record.stage, record.key[:12], made, size, str(len(record.files)), str(record.provenance.get("run_id", "?"))[:8])
    Console().print(table)
    for _, _, problem in unreadable:
        click.echo(f"unreadable: {problem}", err=True)


def show_record(store_url: str, prefix: str) -> None:
    """The record as JSON."""
    record = find(scan(open_store(store_url))[0], prefix)
    click.echo(json.dumps(record.to_json(), indent=1, ensure_ascii=False, sort_keys=True))


def show_lineage(store_url: str, prefix: str) -> None:
    """From the artifact down to its sources, indented; what was shown before is not unfolded again."""
    records = scan(open_store(store_url))[0]
    by_key = {(record.stage, record.key): record for record in records}
    root = find(records, prefix)
    seen: set[tuple[str, str]] = set()

    def tell(name: str, record: ArtifactRecord | None, ref: ArtifactRef | SourceRef, depth: int) -> None:
        indent = "  " * depth
        if isinstance(ref, SourceRef):
            click.echo(f"{indent}{name}: source {ref.name}  sha256 {ref.digest}")
            return
        identity = (ref.stage, ref.key)
        note = "  (its record is gone)" if record is None else "  (see above)" if identity in seen else ""
        click.echo(f"{indent}{name}: {ref.stage} {ref.key[:12]}  content {ref.digest[:12]}{note}")
        if record is not None and identity not in seen:
            seen.add(identity)
            for inner, inner_ref in record.inputs.items():
                made = by_key.get((inner_ref.stage, inner_ref.key)) if isinstance(inner_ref, ArtifactRef) else None
                tell(inner, made, inner_ref, depth + 1)

    tell("artifact", root, root.ref(store_url), 0)


def verify(store_url: str, prefix: str | None) -> int:
    """Prints each problem; 1 when there is one."""
    store = open_store(store_url)
    records, unreadable = scan(store)
    problems = [] if prefix else [problem for _, _, problem in unreadable]
    chosen = [find(records, prefix)] if prefix else records
    for record in chosen:
        problems += [f"{record.stage} {record.key[:12]}: {problem}" for problem in verify_record(store, record)]
    for problem in problems:
        click.echo(problem)
    click.echo(
        f"{len(chosen)} artifacts read, {len(problems)} problems" + ("; the next run computes the damaged ones again" if problems else "")
    )
    return 1 if problems else 0
