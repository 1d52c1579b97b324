"""What a file of the user's code imports: files beside it, the standard library, installed packages; anything else has no stable form."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from twinkle_core.errors import ConfigError

_OURS = frozenset({"storage", "twinkle_core"})
"""Known by the versions of the stages."""


def parse(file: Path) -> ast.Module:
    """Raises `ConfigError` for what is not Python."""
    try:
        return ast.parse(file.read_bytes(), filename=file.name)
    except SyntaxError as error:
        raise ConfigError(f"{file.name} is not Python: {error}") from None


def imported_names(file: Path) -> set[str]:
    """First parts of the names of all imports, wherever they stand; each may be a file beside this one."""
    names: set[str] = set()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                written = "." * node.level + (node.module or "")
                raise ConfigError(f"{file.name} is no part of a package: write 'from NAME import …' without a dot, not 'from {written}'")
            names.add(str(node.module).split(".")[0])
    return names


def defined_names(file: Path) -> set[str]:
    """Names of the functions and classes at the top of the file."""
    return {node.name for node in parse(file).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}


def installed_versions(file: Path, names: Iterable[str]) -> list[tuple[str, str]]:
    """(distribution, version) of those of the names that are installed packages, sorted.

    Raises `ConfigError` for a module that is found by chance: through the current folder, PYTHONPATH or an editable install. No digest
    would tell when it changes. A name that is not found at all is left to the import.
    """
    wanted = sorted(name for name in set(names) - _OURS if name not in sys.stdlib_module_names)
    found: dict[str, str] = {}
    of_modules = packages_distributions() if wanted else {}
    for name in wanted:
        try:
            spec = find_spec(name)
        except ValueError:  # '__main__', say
            spec = None
        if spec is None:
            continue
        places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
        if not all({"site-packages", "dist-packages"} & set(Path(place).parts) for place in places):
            raise ConfigError(
                f"{file.name} imports {name}, which is neither beside it nor an installed package (it lies in {Path(places[0]).parent}), "
                "so no digest would tell when it changes: put it beside the file, or install it"
            )
        found |= {distribution: version(distribution) for distribution in of_modules.get(name, ())}
    return sorted(found.items())
