"""The parts of the environment that decide where a script runs, and what of it workers may see."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinkle_core.errors import ConfigError

NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TMPDIR|TEMP|TZ|TERM|HOSTNAME|VIRTUAL_ENV|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|(HTTP|HTTPS|NO|ALL)_PROXY|HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|DATASETS_CACHE)|MODELSCOPE_CACHE"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|TOKENIZERS_PARALLELISM|CUBLAS_WORKSPACE_CONFIG|TWINKLE_(HOME|STORE|WORKER_ENV)"
    r"|LANG|LANGUAGE|(LC|XDG|CUDA|NVIDIA|ASCEND|NCCL|GLOO|PYTORCH|TRITON|OMP|MKL|KMP|VLLM|TRANSFORMERS|RAY|MALLOC)_.*"
    r"|PYTHON[A-Z]*|TORCH[A-Z]*_.*"
    r"|AWS_.*",  # workers write checkpoints to the store themselves
    re.IGNORECASE,
)
"""What workers may need of the driver's environment. `TWINKLE_WORKER_ENV=A,B` names more."""

CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Settings with which cuBLAS is deterministic: https://docs.nvidia.com/cuda/cublas/#results-reproducibility"""


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """What torchrun says of this process."""

    rank: int
    """From 0 to world_size - 1."""
    world_size: int
    """Processes that run the script."""


def torchrun(environ: Mapping[str, str] | None = None) -> Torchrun | None:
    """From RANK and WORLD_SIZE; None where neither is set."""
    environ = os.environ if environ is None else environ
    rank, world_size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None or not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {world_size}: start the script with torchrun, or unset both")
    return Torchrun(rank=int(rank), world_size=int(world_size))


def ray_address() -> str | None:
    """The cluster that RAY_ADDRESS names."""
    return os.environ.get("RAY_ADDRESS") or None


def names_to_hide(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables of this process that its workers have no use for: tokens, passwords and the like among them."""
    environ = os.environ if environ is None else environ
    asked = {name.strip() for name in environ.get("TWINKLE_WORKER_ENV", "").split(",")}
    return tuple(sorted(name for name in environ if NEEDED.fullmatch(name) is None and name not in asked))


def hide(names: Iterable[str]) -> None:
    """Removes variables from this process's environment."""
    for name in names:
        os.environ.pop(name, None)


def fix_cublas_workspace() -> None:
    """Makes cuBLAS deterministic in this process, before its first product. Raises `ConfigError` where the user chose otherwise."""
    chosen = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES[0])
    if chosen not in CUBLAS_WORKSPACES:
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG is {chosen!r}, with which products differ from run to run; "
            f"set it to {' or '.join(CUBLAS_WORKSPACES)}, or train with deterministic=False"
        )
