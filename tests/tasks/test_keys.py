from collections.abc import Iterator
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Lt

from flows.params import SFTParams
from storage.artifact import ArtifactRef, SourceRef
from tasks.base_model import weights_ref
from tasks.encode import wanted_encoded
from tasks.evaluate import HeldOut, wanted_evaluation
from tasks.export import wanted_model
from tasks.pack import wanted_plan
from tasks.preprocess import STAGE as PREPROCESS
from tasks.publish import wanted_release
from tasks.report import wanted_report
from tasks.shard import wanted_shards
from tasks.step import Wanted
from tasks.train_sft import wanted_checkpoint
from twinkle_core.config import Config, field_mark

VALUES = {
    "model": {"source": "here"},
    "data": {"sources": [{"name": "rows", "uri": "rows.jsonl", "processor": "SelfCognitionProcessor", "processor_args": {"name": "a"}}]},
}
OTHER: dict[str, Any] = {
    "model.source": "elsewhere",
    "data.sources.0.name": "others",
    "data.sources.0.uri": "moved.jsonl",
    "data.sources.0.format": "alpaca",
    "data.sources.0.processor": None,
    "data.sources.0.processor_args": {"name": "b"},
    "data.sources.0.limit": 5,
    "data.sources.0.held_out": 0.25,
    "data.sources.0.columns": {"q": "prompt"},
    "data.filters": ({"name": "LengthFilter"},),
    "data.dedup": "exact",
    "data.mix": "interleave",
    "data.on_bad_row": "skip",
    "template.name": "Qwen3_5Template",
    "template.enable_thinking": False,
    "template.on_bad_row": "skip",
    "template.num_proc": 2,
    "template.chat_template": "{{ messages }}",
    "template.default_system": "Be brief.",
    "template.truncation": "left",
    "template.learn": "last_turn",
    "packing.algorithm": "none",
    "packing.window_samples": 100,
    "train.lora": None,
    "train.lora.target_modules": ("q_proj",),
    "train.schedule": "linear",
    "train.mixed_precision": "bf16",
    "train.activation_checkpointing": "full",
    "export.form": "adapter",
    "export.dtype": "float32",
    "evaluate.probes": ("Who?",),
    "publish.name": "other",
    "publish.target": "/elsewhere",
    "publish.min_accuracy": 0.5,
    "checkpoint.keep_every": 3,
    "resources.mode": "local",
    "resources.ray_address": "10.0.0.1:6379",
}
"""Another valid value of each setting that is not a number or a switch."""


class Base:
    """Stands for a resolved base model: its digests are all that keys take from it."""

    name, digest, tokenizer_digest = "base", "d" * 64, "t" * 64


def ref(stage: str) -> ArtifactRef:
    return ArtifactRef(stage=stage, key=stage, uri="", digest=stage)


def keys(p: SFTParams) -> set[str]:
    """The keys of all stages, given the same content of all inputs."""
    base: Any = Base()
    data = HeldOut(template=p.template, trajectories=ref("t"), encoded=ref("e"))
    sources = {f"source {config.name}": SourceRef(name=config.name, uri=config.uri, digest="s" * 64) for config in p.data.sources}
    wanted = [
        Wanted(stage=PREPROCESS, recipe=p.data.recipe_dump(), inputs=sources),
        wanted_encoded(base, p.template, ref("t")),
        wanted_plan(p.packing, ref("e")),
        wanted_shards(p.shard, ref("e"), ref("p")),
        wanted_evaluation(base, weights_ref(base), p.evaluate, data),
        wanted_checkpoint(base, p.train, ref("s")),
        wanted_model(base, p.export, p.template, ref("c")),
        wanted_report(p.publish, ref("b"), ref("a"), ref("c")),
        wanted_release(p.publish, ref("m"), ref("r")),
    ]
    return {item.key for item in wanted}


def leaves(config: type[Config], value: Config, path: str = "", mark: str = "recipe") -> Iterator[tuple[str, str]]:
    """(dotted name, mark) of every setting; a field inside a resource section is a resource."""
    for name in config.model_fields:
        here = "resource" if mark == "resource" else field_mark(config, name)
        inner, dotted = getattr(value, name), f"{path}{name}"
        if isinstance(inner, Config):
            if type(None) in get_args(config.model_fields[name].annotation):
                yield dotted, here
            yield from leaves(type(inner), inner, f"{dotted}.", here)
        elif isinstance(inner, tuple) and inner and isinstance(inner[0], Config):
            yield from leaves(type(inner[0]), inner[0], f"{dotted}.0.", here)
        else:
            yield dotted, here


DEFAULT = SFTParams.model_validate(VALUES)
LEAVES = dict(leaves(SFTParams, DEFAULT))


def another(dotted: str, value: Any, bounds: list[Any]) -> Any:
    if dotted in OTHER:
        return OTHER[dotted]
    if isinstance(value, bool):
        return not value
    assert isinstance(value, (int, float)), f"add another value of {dotted} to OTHER"
    assert all(isinstance(bound, (Ge, Gt, Lt)) for bound in bounds)
    return value + (0.01 if isinstance(value, float) else 1)


def with_change(dotted: str) -> SFTParams:
    values = DEFAULT.model_dump()
    *parents, last = dotted.split(".")
    section, config = values, DEFAULT
    for part in parents:
        index = int(part) if part.isdigit() else part
        section = section[index]
        config = config[index] if isinstance(index, int) else getattr(config, index)
    bounds = [item for item in type(config).model_fields[last].metadata if isinstance(item, (Ge, Gt, Lt))]
    section[last] = another(dotted, section[last], bounds)
    return SFTParams.model_construct(**{name: type(getattr(DEFAULT, name)).model_validate(values[name]) for name in values})


@pytest.mark.parametrize("dotted", sorted(name for name, mark in LEAVES.items() if mark == "resource"))
def test_a_resource_changes_no_key(dotted: str) -> None:
    changed = with_change(dotted)
    assert changed != DEFAULT
    assert keys(changed) == keys(DEFAULT)


@pytest.mark.parametrize("dotted", sorted(name for name, mark in LEAVES.items() if mark == "recipe"))
def test_a_recipe_field_changes_a_key(dotted: str) -> None:
    changed = with_change(dotted)
    assert changed != DEFAULT
    assert keys(changed) != keys(DEFAULT)


def test_there_are_fields_of_both_kinds() -> None:
    marks = list(LEAVES.values())
    assert marks.count("resource") >= 10
    assert marks.count("recipe") >= 30
