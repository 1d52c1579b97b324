"""The only place that spells a key.

    records/<stage>/<key>.json                        the record of an artifact: its existence means done
    data/<stage>/<key>/<attempt>/…                    its files
    data/<stage>/<key>/<attempt>.parts/<name>.json    of an attempt that others may go on with: a finished file of it
    leases/<stage>/<key>.json                         who computes it now
    runs/<run_id>/spec.json                           the frozen settings of a run
    runs/<run_id>/uses/<stage>/<key>                  an artifact that the run needs: kept until the run has ended
    runs/<run_id>/end.json                            the run has ended well
    checkpoints/<train_key>/HEAD.json                 newest checkpoint and attempt epoch, moved by compare-and-swap
    data/train/<train_key>/step-<step>-e<epoch>/…     files of a checkpoint, and its MANIFEST.json
    releases/<name>/<version>/…                       published models

    store-id                                          random name of the store

No prefix ends with a slash. Each variable part is one plain name.
"""

from __future__ import annotations

import re

from storage.errors import StorageError

PARTS_SUFFIX = ".parts"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")


def _name(value: str, what: str) -> str:
    if not _NAME.fullmatch(value):
        raise StorageError(
            f"{what} {value!r} cannot be part of a key: up to 200 letters, digits and '._=+-', starting with a letter, digit or '_'"
        )
    return value


def artifacts_prefix(stage: str | None = None) -> str:
    """Where the records are, of one stage or of all."""
    return "records" if stage is None else f"records/{_name(stage, 'stage')}"


def record_key(stage: str, key: str) -> str:
    return f"{artifacts_prefix(stage)}/{_name(key, 'artifact key')}.json"


def data_prefix(stage: str, key: str, attempt: str) -> str:
    return f"data/{_name(stage, 'stage')}/{_name(key, 'artifact key')}/{_name(attempt, 'attempt')}"


def attempts_prefix(stage: str, key: str) -> str:
    """Where all attempts at an artifact are."""
    return f"data/{_name(stage, 'stage')}/{_name(key, 'artifact key')}"


def part_marker_key(stage: str, key: str, attempt: str, name: str) -> str:
    """What is known of a finished file of an unfinished attempt. Beside the attempt, not in it: the artifact is without markers."""
    return f"{data_prefix(stage, key, attempt + PARTS_SUFFIX)}/{_name(name, 'file name')}.json"


def all_data_prefix() -> str:
    """Where the files of all artifacts are: <stage>/<key>/<attempt>/… below it, see `data_prefix`."""
    return "data"


def leases_prefix() -> str:
    return "leases"


def lease_key(stage: str, key: str) -> str:
    return f"{leases_prefix()}/{_name(stage, 'stage')}/{_name(key, 'artifact key')}.json"


def runs_prefix() -> str:
    return "runs"


def run_spec_key(run_id: str) -> str:
    return f"{runs_prefix()}/{_name(run_id, 'run id')}/spec.json"


def checkpoints_prefix() -> str:
    return "checkpoints"


def run_use_key(run_id: str, stage: str, key: str) -> str:
    return f"{runs_prefix()}/{_name(run_id, 'run id')}/uses/{_name(stage, 'stage')}/{_name(key, 'artifact key')}"


def run_end_key(run_id: str) -> str:
    return f"{runs_prefix()}/{_name(run_id, 'run id')}/end.json"


def head_key(train_key: str) -> str:
    return f"{checkpoints_prefix()}/{_name(train_key, 'train key')}/HEAD.json"


def checkpoint_prefix(train_key: str, step: int, epoch: int) -> str:
    """Where an attempt (`epoch`) puts the files of a step. A data prefix of the training's artifact, so that the last checkpoint
    becomes the artifact without a copy. Steps are zero-padded, so that a listing is in their order.
    """
    return data_prefix("train", train_key, f"step-{step:09d}-e{epoch}")


def checkpoint_manifest_key(prefix: str) -> str:
    return f"{prefix}/MANIFEST.json"


def releases_prefix() -> str:
    return "releases"


def store_id_key() -> str:
    return "store-id"


def probe_key(token: str) -> str:
    """Scratch of `Store.probe`, deleted by it."""
    return f"probes/{_name(token, 'probe token')}"
