from typing import Any

import pytest

from flows.params import FLOWS, SFTParams
from twinkle_cli.recipes import built_in, load_recipe, put
from twinkle_core.config import Config, field_mark, validate
from twinkle_core.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"source": "m"}, "data": {"sources": [{"name": "rows", "uri": "rows.jsonl"}]}}


def params(**sets: Any) -> SFTParams:
    values = MINIMAL
    for key, value in sets.items():
        values = put(values, key.replace("__", "."), value)
    made = validate(SFTParams, values)
    assert isinstance(made, SFTParams)
    return made


def test_model_and_data_are_asked_for_and_the_rest_has_defaults() -> None:
    assert params().train.lr == 1e-4
    for key in ("model", "data"):
        with pytest.raises(ConfigError, match=f"'{key}' is missing"):
            validate(SFTParams, {name: value for name, value in MINIMAL.items() if name != key})


IMPOSSIBLE = [
    ({"template__max_length": 2048}, "packing.row_length 1024 is less than template.max_length 2048"),
    ({"export__form": "adapter", "train__lora": None}, "export.form 'adapter' needs an adapter"),
    ({"data__sources__0__held_out": 0}, "every source has held_out 0"),
    ({"publish__min_accuracy": 0.5, "evaluate__max_samples": 0}, "publish.min_accuracy 0.5 needs generated answers"),
    ({"data__sources__0__processor_args": {"name": "A"}}, "data.sources.0.processor is null"),
    ({"data__sources__0__uri": "builtin://self_cognition"}, "set data.sources.0.processor"),
    ({"resources__mode": "local", "resources__ray_address": "auto"}, "resources.mode is 'local'"),
    ({"resources__mode": "local", "resources__workers": 2}, "runs one worker, got workers=2"),
    ({"train__batch_size": 8, "train__micro_batch_size": 3}, "batch_size 8 is not a multiple of micro_batch_size 3"),
]


@pytest.mark.parametrize(("sets", "message"), IMPOSSIBLE, ids=[message[:30] for _, message in IMPOSSIBLE])
def test_impossible_combinations_are_refused(sets: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        params(**sets)
    assert message in str(caught.value)


def test_what_stands_next_to_an_impossible_combination_is_possible() -> None:
    params(template__max_length=1024, packing__row_length=1024)
    params(export__form="adapter")
    params(train__lora=None, export__form="merged")
    params(publish__min_accuracy=0.5, evaluate__max_samples=1)
    sources = [{"name": "a", "uri": "a.jsonl", "held_out": 0}, {"name": "b", "uri": "b.jsonl"}]
    params(data__sources=sources)


def test_an_unknown_key_names_the_nearest_known_one_and_only_that() -> None:
    with pytest.raises(ConfigError) as caught:
        params(train__lrr=1e-3)
    assert str(caught.value) == "unknown key 'train.lrr': did you mean 'lr'?"
    with pytest.raises(ConfigError) as caught:
        params(data__sources__0__formt="alpaca")
    assert str(caught.value) == "unknown key 'data.sources.0.formt': did you mean 'format'?"


def test_all_wrong_keys_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        params(train__epochs=0, evaluate__max_samples="many")
    assert len(str(caught.value).splitlines()) == 2


def resource_paths(config: type[Config], values: Config, prefix: str = "") -> list[str]:
    """Dotted names of the settings marked resource, at any depth; a config inside such a one counts with all its fields."""
    paths = []
    for name in config.model_fields:
        value = getattr(values, name)
        if isinstance(value, Config):
            inner = resource_paths(type(value), value, f"{prefix}{name}.")
            paths += inner
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            paths += resource_paths(type(value[0]), value[0], f"{prefix}{name}.0.")
        elif field_mark(config, name) == "resource":
            paths.append(f"{prefix}{name}")
    return paths


OTHER = {
    "fsdp": 4,
    "mode": "local",
    "ray_address": "ray://there:1",
    "keep_every": 7,
    "source": "elsewhere",
    "uri": "elsewhere.jsonl",
    "num_proc": 3,
    "activation_checkpointing": "full",
}


SPREAD = {"train.lora": None, "resources.workers": 4, "resources.fsdp": 2}
"""Settings beside which each size of a mesh may be changed."""
SIZES = ("fsdp", "tp", "cp", "ulysses", "ep", "cpu_offload", "memory_efficient_init")


def test_no_resource_changes_the_recipe() -> None:
    paths = resource_paths(SFTParams, params())
    assert {"model.source", "data.sources.0.uri", "checkpoint.save_every", "resources.workers", "resources.ray_address"} <= set(paths)
    assert {f"resources.{name}" for name in SIZES} <= set(paths)
    for path in paths:
        values = MINIMAL
        for key, value in SPREAD.items() if path.rpartition(".")[2] in SIZES else ():
            values = put(values, key, value)
        base = validate(SFTParams, values)
        old: Any = base.model_dump(mode="json")
        for part in path.split("."):
            old = old[int(part)] if part.isdigit() else old[part]
        new = OTHER.get(path.rpartition(".")[2], None if old is None else old + 1 if isinstance(old, (int, float)) else f"{old}x")
        assert new != old, path
        changed = validate(SFTParams, put(values, path, new))
        assert changed != base, path
        assert changed.recipe_dump() == base.recipe_dump(), path


def test_a_recipe_setting_changes_the_recipe() -> None:
    assert params(train__lr=2e-4).recipe_dump() != params().recipe_dump()
    assert params(data__sources__0__format="alpaca").recipe_dump() != params().recipe_dump()


def test_settings_survive_their_json_form() -> None:
    made = params(train__lora=None, evaluate__probes=["Who are you?"])
    assert validate(SFTParams, made.model_dump(mode="json")) == made


@pytest.mark.parametrize("name", built_in())
def test_each_recipe_that_comes_with_the_project_is_valid(name: str) -> None:
    assert any(_accepts(form, load_recipe(name)) for form in FLOWS.values())


def _accepts(form: type[Config], values: dict[str, Any]) -> bool:
    return isinstance(validate(form, values), form)


def test_there_are_recipes() -> None:
    assert "demo" in built_in()
