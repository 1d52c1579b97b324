"""Which files of a dataset repository make up a subset and a split: the rules of the `datasets` library, on names alone.

`datasets` looks at the card's `configs` and else at the names (https://huggingface.co/docs/datasets/repository_structure). It is given a
folder of empty files with the repository's names, so it asks no hub, reads no row and runs no script, for either hub.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from storage.uri import resolve_inside
from twinkle_core.errors import ConfigError, StorageError

CARDS = ("README.md", ".huggingface.yaml")
"""Files that `datasets` reads to find subsets and splits."""

_LEFT_OUT = ("dataset_infos.json", "dataset_info.json")


def split_files(where: str, names: Iterable[str], cards: Mapping[str, bytes], subset: str | None, split: str | None) -> tuple[str, ...]:
    """Names of the files of `split` (None: train, or the only one) of `subset` (None: the default one), in order.

    `where` names the repository in errors. Raises `ConfigError` naming the subsets or splits that there are.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        root = Path(folder).resolve()
        for name in names:
            if not name.endswith(".py") and name not in _LEFT_OUT:
                path = _inside(root, name, where)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(cards.get(name, b""))
        splits = _splits(where, root, Path(scratch), subset)
        chosen = split or ("train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else "")
        if chosen not in splits:
            asked = f"no split {split!r}" if split else "no split 'train'"
            raise ConfigError(
                f"{where} has {asked}; add ?split=NAME with one of {', '.join(splits)} (a part such as train[:10%] is no name)"
            )
        return tuple(Path(os.path.relpath(path, root)).as_posix() for path in splits[chosen])


def _splits(where: str, root: Path, scratch: Path, subset: str | None) -> dict[str, list[str]]:
    from datasets import load_dataset_builder  # type: ignore[import-untyped]
    from datasets.exceptions import DatasetsError  # type: ignore[import-untyped]

    try:
        builder = load_dataset_builder(str(root), name=subset, cache_dir=str(scratch))
    except (DatasetsError, FileNotFoundError) as error:
        message = str(error).replace(str(root), where)
        raise ConfigError(f"{where}: {message}; scripts are not run, so it must hold data files") from None
    except (ValueError, TypeError, RuntimeError) as error:
        message = str(error).split("\nExample of usage")[0].replace("\n", " ").replace(str(root), where)
        raise ConfigError(f"{where}: {message} (a subset is named as ?subset=NAME)") from None
    return {str(name): [str(path) for path in paths] for name, paths in (builder.config.data_files or {}).items()}


def _inside(root: Path, name: str, where: str) -> Path:
    try:
        return resolve_inside(root, name)
    except StorageError as error:
        raise ConfigError(f"{where} holds a file whose name is refused: {error}") from None
