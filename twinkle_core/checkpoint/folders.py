"""Checkpoint folders beside each other, as `save` and HF Trainer write them: which one is the newest that is whole.

A folder has no digests: what can be told without loading it is that each file is there and has its whole length. Training through the
store has digests (see `restore`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core.errors import ConfigError

WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
STATE_FILE = "trainer_state.json"
INDEX_SUFFIX = ".safetensors.index.json"
PARTED = ("weights", "optimizer")
"""Folders of tensors of which several workers wrote parts (`model.parallel.sharded_files`), in place of one file."""
PARTS_INDEX = "index.json"
_NUMBERED = re.compile(r"(?:checkpoint|checkpoint-step|step)-(\d+)")
_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class FoundFolder:
    """The newest whole folder, if any, and what was wrong with newer ones."""

    path: Path | None
    problems: tuple[str, ...]


def numbered_folders(output_dir: str | Path) -> list[Path]:
    """`checkpoint-N`, `checkpoint-step-N` and `step-N`, newest first: by the number, not by the name or the clock. Others are left out."""
    top = Path(output_dir)
    if not top.is_dir():
        raise ConfigError(f"folder {top} does not exist here")
    found = [(int(match[1]), path) for path in top.iterdir() if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def newest_whole_folder(output_dir: str | Path) -> FoundFolder:
    """The newest checkpoint that is whole, to be given to `resume_from_checkpoint`; newer ones that are not are named with the reason."""
    problems: list[str] = []
    for path in numbered_folders(output_dir):
        damage = folder_problems(path)
        if not damage:
            return FoundFolder(path=path, problems=tuple(problems))
        problems.append(f"{path} is not used: {'; '.join(damage)}")
    return FoundFolder(path=None, problems=tuple(problems))


def folder_problems(folder: Path) -> list[str]:
    """What is missing from a folder, or cut short. [] means that it can be loaded as far as lengths tell."""
    problems = [] if (folder / STATE_FILE).exists() else [f"{STATE_FILE} is missing"]
    parted = [name for name in PARTED if (folder / name).is_dir()]
    if not any((folder / name).exists() for name in WEIGHTS) and "weights" not in parted:
        problems.append(f"no weights ({', '.join(WEIGHTS)})")
    if (folder / WEIGHTS[0]).exists() and (folder / "training.json").exists() and not (folder / "adapter_config.json").exists():
        problems.append("adapter_config.json is missing")
    moments = "optimizer" if "optimizer" in parted else "optimizer.safetensors"
    for name, others in {"training.json": (moments, "rng.safetensors"), moments: ("training.json",)}.items():
        if (folder / name).exists():
            problems += [f"{other} is missing" for other in others if not (folder / other).exists()]
    for name in parted:
        problems += [] if (folder / name / PARTS_INDEX).exists() else [f"{name}/{PARTS_INDEX} is missing"]
    for path in sorted(path for top in (folder, *(folder / name for name in parted)) for path in top.iterdir()):
        problem = _file_problem(path)
        problems += [f"{path.relative_to(folder)} {problem}"] if problem else []
    return list(dict.fromkeys(problems))


def _file_problem(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        return _tensors_problem(path)
    if path.suffix == ".json":
        return _json_problem(path)
    return "is empty" if path.is_file() and path.stat().st_size == 0 and not path.name.startswith(".") else None


def _json_problem(path: Path) -> str | None:
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    try:
        if path.name == PARTS_INDEX and path.parent.name in PARTED:
            files = sorted({part["file"] for entry in value["tensors"].values() for part in entry["parts"]})
        elif path.name.endswith(INDEX_SUFFIX):
            files = sorted(set(value["weight_map"].values()))
        else:
            return None
    except (KeyError, TypeError, AttributeError):
        return "names no shards"
    missing = [name for name in files if not (path.parent / name).exists()]
    return f"names files that are missing: {', '.join(missing[:5])}" if missing else None


def _tensors_problem(path: Path) -> str | None:
    """Header and length: github.com/huggingface/safetensors#format."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _HEADER_LENGTH_BYTES or length > size - _HEADER_LENGTH_BYTES:
                return f"is cut short ({size} bytes)"
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = _HEADER_LENGTH_BYTES + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return None if size == whole else f"has {size} bytes, not {whole}"
