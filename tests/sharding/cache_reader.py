"""A process that opens files through a `ShardCache`, for tests that kill it.

python -m tests.sharding.cache_reader STORE FOLDER MAX_BYTES SECONDS_A_FETCH SEED NUM_OPENS
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

from storage.artifact import FileEntry
from storage.local import FileStore
from storage.uri import parse
from twinkle_core.sharding.cache import ShardCache


class SlowStore(FileStore):
    """Writes an object piece by piece, and notes each fetch in `fetches.log` beside the store."""

    seconds = 0.0

    def _fetch(self, key: str, path: Path) -> None:
        log = Path(self.url.removeprefix("file://")).parent / "fetches.log"
        with log.open("a") as file:
            file.write(f"{key}\n")
        data = self.get(key)
        with path.open("xb") as target:
            for at in range(0, len(data), 1000):
                target.write(data[at : at + 1000])
                target.flush()
                time.sleep(self.seconds * 1000 / len(data))


def slow_store(root: Path, seconds: float) -> SlowStore:
    store = SlowStore(parse(str(root)))
    store.seconds = seconds
    return store


def main() -> int:
    root, folder, max_bytes, seconds, seed, num_opens = sys.argv[1:]
    store = slow_store(Path(root), float(seconds))
    entries = [FileEntry.from_json(entry) for entry in json.loads(store.get("entries.json"))]
    cache = ShardCache(Path(folder), int(max_bytes))
    rng = random.Random(int(seed))
    for _ in range(int(num_opens)):
        entry = rng.choice(entries)
        with cache.open(store, "data", entry) as file:
            time.sleep(rng.random() * 0.01)
            assert hashlib.sha256(file.read()).hexdigest() == entry.sha256
    print("whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
