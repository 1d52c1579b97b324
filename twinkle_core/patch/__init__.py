"""Patches: changes to a model, by name, class or function. A name is one of a closed list; code of a hub is never fetched and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.patch.base import Patch
from twinkle_core.patch.no_split_modules import NoSplitModulesPatch

PATCHES: Mapping[str, type[Patch]] = MappingProxyType({"NoSplitModulesPatch": NoSplitModulesPatch})
NOT_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "GatedDeltaNetPaddingFreePatch": "recurrent layers keep the documents of a packed row apart by themselves",
        "TransformersEmbeddingPatch": "forward_only(task='embedding') and losses over embeddings need none",
        "TransformersFusedCEPatch": "set_loss('FusedLinearCrossEntropyLoss') needs none",
        "Qwen3ChatTemplate": "the template marks what is learnt without another chat template",
        "Qwen3AllowToolTailTemplate": "the template marks what is learnt without another chat template",
        "MegatronEmbeddingPatch": "it is for Megatron's models, which are not there",
        "MegatronPeft": "it is for Megatron's models, which are not there",
        "VLLMLoraWeights": "it is for a sampler, and this is a model in training",
        "VLLMMoEWeights": "it is for a sampler, and this is a model in training",
    }
)
"""Twinkle's other patches → why there is none here."""


def build_patch(patch: Any, arguments: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """A function of the model.

    Of a `Patch` (its name, its class, or one that is made) and of a function: called with the model and the arguments. Of any other
    class: made with the arguments, called with the model.

    Raises `ConfigError` for an unknown name (naming the known), a plug-in's address, and arguments that are not taken.
    """
    given = dict(arguments or {})
    if isinstance(patch, str):
        patch = _named(patch)
    if isinstance(patch, type) and not issubclass(patch, Patch):
        _check(patch, patch.__name__, given)
        made = patch(**given)
        if not callable(made):
            raise ConfigError(f"patch is {patch.__name__}, whose objects cannot be called with the model")
        return made
    made = patch() if isinstance(patch, type) else patch
    if not callable(made):
        raise ConfigError(f"patch is {patch!r}, which cannot be called with the model")
    if not given:
        return made  # type: ignore[no-any-return]
    _check(made, getattr(made, "__name__", type(made).__name__), given)
    return partial(made, **given)


def apply_patch(module: Any, patch: Any, **arguments: Any) -> Any:
    """Applies a patch to a model, or another object, of this process. As `TransformersModel.apply_patch` does on workers."""
    return build_patch(patch, arguments)(module)


@contextmanager
def apply_context(module: Any, patch: str | type[Patch] | Patch, **arguments: Any) -> Iterator[Any]:
    """Applies a patch and takes it back at the end, whatever happened in between. Raises `ConfigError` for what is no `Patch`."""
    made = _named(patch)() if isinstance(patch, str) else patch() if isinstance(patch, type) else patch
    if not isinstance(made, Patch):
        raise ConfigError(f"patch is {patch!r}, which cannot be taken back: give a name, or a class of twinkle_core.patch.Patch")
    result = build_patch(made, arguments)(module)
    try:
        yield result
    finally:
        made.unpatch(module)


def _named(name: str) -> type[Patch]:
    if name in PATCHES:
        return PATCHES[name]
    if name in NOT_NEEDED:
        raise ConfigError(f"patch {name!r} is not there: {NOT_NEEDED[name]}")
    if "://" in name:
        raise ConfigError(f"patch is {name!r}: code that comes from a hub is never run; import it yourself and give the class")
    raise ConfigError(f"patch is {name!r}; known: {', '.join(PATCHES)}; or give a function of the model, or a class of such")


def _check(function: Any, name: str, given: Mapping[str, Any]) -> None:
    taken = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    if unknown := [argument for argument in given if argument not in taken]:
        raise ConfigError(f"patch {name} takes no {unknown[0]!r}; known: {', '.join(taken)}")


__all__ = ["NOT_NEEDED", "PATCHES", "Patch", "apply_context", "apply_patch", "build_patch"]
