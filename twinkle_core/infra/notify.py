"""Telling the notifier that `initialize` was given of an error in a remote method."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from twinkle_core.infra.state import STATE

Function = TypeVar("Function", bound=Callable[..., Any])
_LOG = logging.getLogger(__name__)


def notify(what: str, error: BaseException) -> None:
    """Tells of an error that goes on to the caller. A notifier that fails is logged and does not hide it. Twice told is told once."""
    runtime = STATE.runtime
    if runtime is None or runtime.notifier is None or getattr(error, "__notified__", False):
        return
    name = f"{runtime.name}: " if runtime.name else ""
    try:
        error.__notified__ = True  # type: ignore[attr-defined]
        runtime.notifier(f"{name}{what} raised {type(error).__name__}: {error}")
    except Exception as failure:  # the notifier is the user's: whatever it raises must not hide what it was to tell
        _LOG.warning("the notifier failed with %s: %s", type(failure).__name__, failure)


def notified(function: Function) -> Function:
    """`function`, whose errors in this process are told to the notifier."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, StopIteration):
                notify(f"{type(self).__name__}.{function.__name__}", error)
            raise

    return call  # type: ignore[return-value]
