"""What changes how a model computes."""

from __future__ import annotations

from typing import Any

from twinkle_core.errors import ConfigError


class Patch:
    """A change to a model that is there already; a subclass is one change. Its parameters stay the ones they are.

    Override `__call__(self, module, …)`, whose further arguments are those of `apply_patch`, and `unpatch` where it can be taken back.
    """

    def __call__(self, module: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no __call__(module)")

    def unpatch(self, module: Any) -> None:
        """Takes the change back."""
        raise ConfigError(f"{type(self).__name__} cannot be taken back: it has no unpatch(module)")
