"""Conversations -> token ids and labels.

Names are imported when they are asked for: a worker that encodes needs `Encoder` alone, and starts in a fraction of the time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_core.template.base import Template, concat_input_feature, tokenizer_digest
    from twinkle_core.template.encoder import Encoder
    from twinkle_core.template.outcome import Outcome
    from twinkle_core.template.run import encode

TEMPLATES: dict[str, str] = {
    "Template": "twinkle_core.template.base",
    "Qwen3_5Template": "twinkle_core.template.qwen3_5",
    "DeepseekV4Template": "twinkle_core.template.deepseek_v4",
}
"""Template classes by name, with the module of each."""

_MODULES = {
    **TEMPLATES,
    "Encoder": "twinkle_core.template.encoder",
    "Outcome": "twinkle_core.template.outcome",
    "concat_input_feature": "twinkle_core.template.base",
    "encode": "twinkle_core.template.run",
    "tokenizer_digest": "twinkle_core.template.base",
}


def template_class(template: str | type[Template]) -> type[Template]:
    """The class called `template`; a class is taken as it is. Raises `ConfigError` naming the known ones."""
    if not isinstance(template, str):
        return template
    if template not in TEMPLATES:
        raise ConfigError(f"unknown template {template!r}; known: {', '.join(TEMPLATES)}")
    found: type[Template] = getattr(import_module(TEMPLATES[template]), template)
    return found


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


__all__ = ["TEMPLATES", "Encoder", "Outcome", "Template", "concat_input_feature", "encode", "template_class", "tokenizer_digest"]
