"""Conversations -> token ids and labels."""

from twinkle_core.errors import ConfigError
from twinkle_core.template.base import Template, tokenizer_digest
from twinkle_core.template.run import encode

TEMPLATES: dict[str, type[Template]] = {"Template": Template}


def template_class(template: str | type[Template]) -> type[Template]:
    """The class called `template`; a class is taken as it is. Raises `ConfigError` naming the known ones."""
    if isinstance(template, str):
        if template not in TEMPLATES:
            raise ConfigError(f"unknown template {template!r}; known: {', '.join(TEMPLATES)}")
        return TEMPLATES[template]
    return template


__all__ = ["TEMPLATES", "Template", "encode", "template_class", "tokenizer_digest"]
