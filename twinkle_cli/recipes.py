"""From what a user typed to a flow's settings, as plain values: a built-in recipe or a YAML file, then options, then --set."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from twinkle_core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core types, and no key twice.

    YAML 1.1 reads 1e-4 as text, `no` as false, 1_000 and 010 as other numbers, and 2026-01-01 as a date.
    """


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text; put it in quotes", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node).replace(".inf", "inf").replace(".nan", "nan"))
)


def load_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises `ConfigError` naming `where`, line and column."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise ConfigError(f"{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def built_in() -> list[str]:
    """Names of the recipes that come with the project."""
    import flows.recipes

    return sorted(module.name for module in pkgutil.iter_modules(flows.recipes.__path__))


def load_recipe(name_or_path: str) -> dict[str, Any]:
    """Settings of a built-in recipe, or of a YAML file."""
    if name_or_path in built_in():
        return dict(importlib.import_module(f"flows.recipes.{name_or_path}").recipe())
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no recipe and no file '{name_or_path}'; {nearest(name_or_path, built_in())}")
    try:
        values = load_yaml(path.read_text(encoding="utf-8"), name_or_path)
    except UnicodeDecodeError:
        raise ConfigError(f"'{name_or_path}' is not a text file in UTF-8") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"'{name_or_path}' holds a {type(values).__name__}, not settings like 'train:' with indented lines below")
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    """What to try instead of an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"


def merge(values: Mapping[str, Any], *, data: str | None, model: str | None, name: str | None, sets: Iterable[str]) -> dict[str, Any]:
    """New settings: `values`, then --data, --model and --name, then each --set in order. Local files become absolute paths."""
    merged = _copy(dict(values))
    if data is not None:
        merged = put(merged, "data.sources", [{"name": _source_name(data), "uri": data}])
    if model is not None:
        merged = put(merged, "model.source", model)
    if name is not None:
        merged = put(merged, "publish.name", name)
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text!r} is not of the form key=value, e.g. train.lr=1e-4")
        where = f"--set {key.strip()} (text with ':', '{{' or '#' needs quotes inside the value)"
        merged = put(merged, key.strip(), load_yaml(value, where))
    return _with_absolute_paths(merged)


def put(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with the dotted `key` (numbers index lists) set to `value`; mappings on the way are made, the argument is left as it was."""
    head, _, rest = key.partition(".")
    if not rest:
        return {**values, head: value}
    inner = values.get(head)
    if isinstance(inner, (list, tuple)):
        return {**values, head: _put_item(list(inner), rest, value, head)}
    if inner is not None and not isinstance(inner, dict):
        raise ConfigError(f"cannot set '{key}': '{head}' is {inner!r}, not a group of settings")
    return {**values, head: put(inner or {}, rest, value)}


def _put_item(items: list[Any], key: str, value: Any, where: str) -> list[Any]:
    index, _, rest = key.partition(".")
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"'{where}' has {len(items)} entries: '{where}.{key}' should begin with a number from 0 to {len(items) - 1}")
    i = int(index)
    if rest and not isinstance(items[i], dict):
        raise ConfigError(f"cannot set '{where}.{key}': '{where}.{i}' is {items[i]!r}, not a group of settings")
    items[i] = put(items[i], rest, value) if rest else value
    return items


def _source_name(uri: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(uri.partition("?")[0]).stem).lstrip("_.-")
    return stem or "data"


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """A worker or a retry may run in another folder."""
    values = _copy(values)
    data, model, publish = (values.get(group) for group in ("data", "model", "publish"))
    sources = data.get("sources") if isinstance(data, dict) else None
    for source in sources if isinstance(sources, (list, tuple)) else ():
        if isinstance(source, dict):
            uri = source.get("uri")
            if isinstance(uri, (list, tuple)):
                source["uri"] = [_absolute(item) if _is_local(item) else item for item in uri]
            elif _is_local(uri):
                source["uri"] = _absolute(str(uri))
    if isinstance(model, dict) and _is_local(model.get("source")):
        path = Path(model["source"]).expanduser()
        if path.exists() or model["source"].startswith((".", "/", "~")) or path.suffix == ".gguf":  # else org/name on the hub
            model["source"] = _absolute(model["source"])
    if isinstance(publish, dict) and _is_local(publish.get("target")):
        publish["target"] = _absolute(publish["target"])
    return values


def _is_local(uri: Any) -> bool:
    return isinstance(uri, str) and uri != "" and "://" not in uri


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, (list, tuple)) else value
