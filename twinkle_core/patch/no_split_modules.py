"""Telling which modules of a model are not to be split when it is sharded."""

from __future__ import annotations

from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.patch.base import Patch


class NoSplitModulesPatch(Patch):
    """Names the decoder layer's class for a model that names none, so that `fsdp_size` and activation checkpointing can be used.

    Example: `model.apply_patch("NoSplitModulesPatch", names=["MyDecoderLayer"])`, before the first optimizer is set.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def __call__(self, module: Any, names: tuple[str, ...] | list[str] = ()) -> None:
        """Raises `ConfigError` for a name that no module of the model has, and for none at all."""
        there = {type(part).__name__ for part in module.modules()}
        if not names or (unknown := sorted(set(names) - there)):
            wrong = "no name is given" if not names else f"{', '.join(unknown)} is no class of a module of it"
            raise ConfigError(f"NoSplitModulesPatch of {type(module).__name__}: {wrong}; known: {', '.join(sorted(there))}")
        self._before = module._no_split_modules
        module._no_split_modules = set(names)

    def unpatch(self, module: Any) -> None:
        module._no_split_modules = self._before
