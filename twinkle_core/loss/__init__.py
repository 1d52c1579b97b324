"""Losses: each gives a sum and a weight, never a mean. The modules import torch; this package does not until a loss is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs

LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "CrossEntropyLoss": "cross_entropy",
        "ChunkedCrossEntropyLoss": "chunked_cross_entropy",
        "FusedLinearCrossEntropyLoss": "fused_linear_cross_entropy",
        "MSELoss": "mse",
        "GKDLoss": "gkd",
        "GRPOLoss": "grpo",
        "GSPOLoss": "gspo",
        "SAPOLoss": "sapo",
        "CISPOLoss": "cispo",
        "BNPOLoss": "bnpo",
        "DRGRPOLoss": "dr_grpo",
        "DPOLoss": "dpo",
        "SimPOLoss": "simpo",
        "CPOLoss": "cpo",
        "ORPOLoss": "orpo",
        "KTOLoss": "kto",
        "RewardModelLoss": "reward_model",
        "InfonceLoss": "infonce",
    }
)
"""Class → module of this package."""
ALIASES: Mapping[str, str] = MappingProxyType({"LigerFusedLinearCrossEntropyLoss": "FusedLinearCrossEntropyLoss"})
"""Twinkle's name → ours."""


def build_loss(
    loss: str | type[Loss] | Callable[[LossInputs, ModelOutputs], LossOutput], arguments: Mapping[str, Any] | None = None
) -> Callable[[LossInputs, ModelOutputs], LossOutput]:
    """The loss that is meant: a name or a class, made with the arguments; a callable (inputs, outputs) -> `LossOutput` as it is.

    Names are those of Twinkle, https://github.com/modelscope/twinkle, and a few more.

    Raises `ConfigError` for an unknown name (naming the known) and for arguments that it does not take.
    A callable without `needs`, as `Loss.needs`, is given log-probabilities only.
    """
    given = dict(arguments or {})
    if isinstance(loss, str):
        loss = _named(loss)
    if not isinstance(loss, type):
        if not callable(loss):
            raise ConfigError(f"loss is {loss!r}; give a name ({', '.join(LOSSES)}), a class or a callable (inputs, outputs)")
        if given:
            raise ConfigError(f"loss {loss!r} is made already; it takes no arguments {', '.join(given)}")
        return loss
    taken = inspect.signature(loss).parameters
    if unknown := [name for name in given if name not in taken]:
        raise ConfigError(f"{loss.__name__} takes no {unknown[0]!r}; known: {', '.join(taken)}")
    made: Callable[[LossInputs, ModelOutputs], LossOutput] = loss(**given)
    return made


def _named(name: str) -> Any:
    name = ALIASES.get(name, name)
    if name not in LOSSES:
        raise ConfigError(f"loss is {name!r}; known: {', '.join(LOSSES)}")
    return getattr(import_module(f"{__name__}.{LOSSES[name]}"), name)


def __getattr__(name: str) -> Any:
    """The losses by name, imported when first asked for."""
    if name in LOSSES or name in ALIASES:
        return _named(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ALIASES", "LOSSES", "build_loss"]
