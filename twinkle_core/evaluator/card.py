"""The model card: README.md of a release, with the front matter that hubs read. No date and no local path is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from twinkle_core.errors import DataError
from twinkle_core.hub.local_paths import local_paths_in_text


def render_card(
    *,
    name: str,
    base_model: str,
    form: Literal["merged", "adapter"],
    datasets: Sequence[str],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    training: Mapping[str, str | int | float],
    lineage: Mapping[str, str],
    base_model_uri: str | None = None,
    language: str | None = None,
    license_id: str | None = None,
) -> str:
    """Markdown with YAML front matter; the same arguments give the same text.

    `base_model` and `base_model_uri` are `ModelSource.name` and `.public_uri`; `datasets` are source names.
    `before` and `after` are results of `evaluate_model`. `training` and `lineage` become tables: setting to value, stage to digest.
    Raises `DataError` when a local path would be published.
    """
    front = {
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model,
        "base_model_relation": "adapter" if form == "adapter" else "finetune",
        "license": license_id,
        "language": language,
        "datasets": list(datasets),
        "tags": ["twinkle", "sft", "lora"] if form == "adapter" or "lora" in " ".join(training).lower() else ["twinkle", "sft"],
    }
    parts = ["---\n" + _yaml(front) + "---", f"# {_text(name)}"]
    origin = f" (`{base_model_uri}`)" if base_model_uri else ""
    kind = "An adapter for" if form == "adapter" else "A fine-tune of"
    parts.append(f"{kind} {_text(base_model)}{origin}, trained on {', '.join(_text(item) for item in datasets) or 'no named data'}.")
    if before and after:
        parts += ["## Held-out results", _results(before["numbers"], after["numbers"])]
    if form == "merged":
        parts += ["## Use", _USE]
    if training:
        parts += ["## Training", _table(("setting", "value"), [(key, str(value)) for key, value in training.items()])]
    if lineage:
        rows = [(stage, f"`{digest}`") for stage, digest in lineage.items()]
        parts += ["## Lineage", "Each stage by the sha256 digest of its content.", _table(("stage", "digest"), rows)]
    card = "\n\n".join(parts) + "\n"
    if found := local_paths_in_text(card):
        raise DataError(f"the model card would publish the local path {found[0]!r}: pass public names only")
    return card


_USE = """```python
from transformers import pipeline

chat = pipeline("text-generation", model="<this folder or repository>")
print(chat([{"role": "user", "content": "Who are you?"}])[0]["generated_text"][-1]["content"])
```"""


def _results(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    rows = []
    sources = sorted({*before["by_source"], *after["by_source"]})
    pairs = [("all", before["all"], after["all"])]
    pairs += [(source, before["by_source"].get(source, {}), after["by_source"].get(source, {})) for source in sources]
    for source, old, new in pairs:
        cells = [_number(numbers.get("loss"), ".4f") for numbers in (old, new)]
        cells += [_number(numbers.get(key), ".1%") for key in ("token_accuracy", "answer_accuracy") for numbers in (old, new)]
        rows.append((source, *cells))
    header = ["held-out rows", *(f"{what} {when}" for what in ("loss", "token acc.", "answer acc.") for when in ("before", "after"))]
    return _table(header, rows)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


def _text(value: str) -> str:
    return re.sub(r"[\r\n]+", " ", value).replace("|", "\\|").replace("<", "&lt;")


def _yaml(values: Mapping[str, Any]) -> str:
    """Strings as JSON writes them, which YAML reads; so no value can end the front matter or become a number."""
    lines = []
    for key, value in values.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {json.dumps(item)}" for item in value)] if value else []
        elif value is not None:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"
